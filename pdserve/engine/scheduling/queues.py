"""Holds every live request by its status, and knows whose turn it is to get a place in the batch.

Waiting requests take turns by client request, however many engine requests (prompts times ``n``) that is: a place goes
to the client request that holds the fewest, and among equals to the one that has waited longest, where a lower
``priority`` counts as waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import TypeAlias

from pdserve.engine.placement.latency_targets import OwnItl
from pdserve.engine.request import Request, Status

GroupId: TypeAlias = int | bytes

_PLACES = (Status.RUNNING, Status.WAITING_FOR_REMOTE_KVS)


class Queues:
    """All live requests. Children that wait for their parent's prompt are found through their parent."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        """The waiting requests in the order of their arrival, moved by their priorities (``Request.turn_at``)."""
        self.running: list[Request] = []
        self.remote: set[Request] = set()
        """The requests whose prompts are being fetched."""
        self.pushing: set[Request] = set()
        self._places: Counter[GroupId] = Counter()
        self._waiters: Counter[GroupId] = Counter()

    @property
    def num_admitted(self) -> int:
        """The number of requests that are in the batch or whose prompts are being fetched."""
        return len(self.running) + len(self.remote)

    @property
    def uncomputed_prompt_tokens(self) -> int:
        """The number of tokens of admitted prompts, and of answers that are replayed, that are to be computed here."""
        return sum(tokens for request in self.running if (tokens := request.num_uncomputed_tokens) > 1)

    @property
    def decoding(self) -> tuple[int, int, OwnItl]:
        """The number of running requests that decode, that of the tokens of their contexts, and their own ITL targets.

        An order of another node does not decode, though it is running until its first token is sent.
        """
        decoding = [request for request in self.running if request.prompt_is_computed and not request.serves_push]
        context_tokens = sum(request.num_computed_tokens for request in decoding)
        return len(decoding), context_tokens, OwnItl.of(request.terms.own_targets for request in decoding)

    @property
    def num_children(self) -> int:
        """The number of requests of this node's clients that wait for their parents' prompts."""
        held = chain(self.waiting, self.running, self.remote)
        return sum(len(request.children) for request in held if request.local_id is not None)

    def live(self) -> Iterator[Request]:
        """Yields every request that has not finished."""
        for request in chain(self.waiting, self.running, self.remote, self.pushing):
            yield request
            yield from request.children

    # ------------------------------------------------------------ turns

    def places_of(self, request: Request) -> int:
        """Returns how many places the request's client request holds."""
        return self._places[request.group_id]

    def in_turn(self) -> Iterator[Request]:
        """Yields waiting requests in the order in which they get places, if each gets one as it is yielded.

        Most steps need only the first few, so client requests without a place come before anything is sorted.
        """
        later: dict[GroupId, list[Request]] = {}
        for request in tuple(self.waiting):
            group = request.group_id
            if group in later or group in self._places:
                later.setdefault(group, []).append(request)
            else:
                later[group] = []
                yield request
        turns = [(self._places[group], at, 0, group) for at, group in enumerate(later) if later[group]]
        heapify(turns)
        while turns:
            _, at, index, group = heappop(turns)
            yield later[group][index]
            if index + 1 < len(later[group]):
                heappush(turns, (self._places[group], at, index + 1, group))

    def before_waiting(self, request: Request) -> bool:
        """Returns whether a place goes to this request, which is not waiting, rather than to one that is."""
        held = self.places_of(request)
        return all(self._places[other] >= held for other in self._waiters)

    @property
    def any_without_place(self) -> bool:
        """Whether a client request waits that holds no place at all."""
        return any(group not in self._places for group in self._waiters)

    def most_placed(self) -> Request | None:
        """Returns the youngest running request of the client request that holds the most places, if several.

        Requests that serve a push are left out, because none of them can be preempted.
        """
        if max(self._places.values(), default=0) < 2:
            return None
        own = (request for request in reversed(self.running) if not request.serves_push)
        youngest = max(own, key=self.places_of, default=None)
        return youngest if youngest is not None and self.places_of(youngest) > 1 else None

    # ------------------------------------------------------------ moves

    def add(self, request: Request) -> None:
        """Queues a new request behind all others of its priority."""
        self._insert(request)

    def move(self, request: Request, status: Status) -> None:
        """Changes a request's status and puts it where requests of that status are."""
        self._take_out(request)
        request.move(status)
        match status:
            case Status.WAITING:
                self._insert(request)
            case Status.RUNNING:
                self.running.append(request)
            case Status.WAITING_FOR_REMOTE_KVS:
                self.remote.add(request)
            case Status.PUSHING:
                self.pushing.add(request)
        if status in _PLACES:
            self._places[request.group_id] += 1

    def _insert(self, request: Request) -> None:
        if not self.waiting or self.waiting[-1].turn_at <= request.turn_at:
            self.waiting.append(request)
        else:
            later = (i for i, other in enumerate(self.waiting) if other.turn_at > request.turn_at)
            self.waiting.insert(next(later), request)
        self._waiters[request.group_id] += 1

    def _take_out(self, request: Request) -> None:
        match request.status:
            case Status.WAITING:
                self.waiting.remove(request)
                _one_less(self._waiters, request.group_id)
            case Status.RUNNING:
                self.running.remove(request)
            case Status.WAITING_FOR_REMOTE_KVS:
                self.remote.remove(request)
            case Status.PUSHING:
                self.pushing.remove(request)
            case Status.WAITING_FOR_PROMPT:
                if request.parent is not None:
                    request.parent.children.remove(request)
        if request.status in _PLACES:
            _one_less(self._places, request.group_id)


def _one_less(counts: Counter[GroupId], group: GroupId) -> None:
    counts[group] -= 1
    if not counts[group]:
        del counts[group]
