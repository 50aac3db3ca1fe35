"""Says what one request does after each failure: try a node, wait for one, or give up.

    ask ──▶ a node takes it ──▶ answered
     ▲  └──▶ it fails ──▶ a node that was not asked yet ──▶ ask
     │                └─▶ none is left, and one may come (back) ──▶ wait ──▶ ask
     └────────────────└─▶ none may come, the wait is over, two nodes are lost, or 16 were asked ──▶ give up

Nothing here does I/O or reads a clock: failures and the time go in, the next step comes out. ``relay`` does the rest.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pdserve.errors import BadUpstream, Gone, RequestError, Unavailable
from pdserve_proxy.continuation.losses import MAX_LOSSES, LostNode, ReturnedRequest
from pdserve_proxy.records.node_counts import NodeFailure
from pdserve_proxy.relay.complete_answer import CompleteResponse
from pdserve_proxy.relay.route_wait import Wait
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route

MAX_ATTEMPTS = 16
"""The attempts at one request. Where so many nodes in a row are busy, more attempts only add to their load."""


class FailureKind(enum.Enum):
    """Why an attempt failed. Every consequence follows from the kind."""

    BUSY = "busy"
    """The node takes no requests now."""
    TICKET_REFUSED = "ticket_refused"
    """The node does not accept this proxy's ticket."""
    NO_STORED_ANSWER = "no_stored_answer"
    """The node does not have the answer for which a client asks again; another one may."""
    UNREACHABLE = "unreachable"
    """No connection to the node came about. It may be there again soon, with the answers that it stores."""
    PROCESS_GONE = "process_gone"
    """The node's host refused the connection: the process is gone, and what it stored too."""
    LOST = "lost"
    """The node was lost before its first byte. Perhaps only the connection was: the node may be there again soon."""
    NOT_CONTINUED = "not_continued"
    """The node was lost with an answer that has a journal, and no other one could go on."""
    NOT_CONTINUED_IN_TIME = "not_continued_in_time"
    """As above, after the request has waited as long as it may for a node that goes on."""
    PREFILL_LOST = "prefill_lost"
    """The node returned the request, since prefill nodes were lost with it. The node itself lives."""
    LINK_LOST = "link_lost"
    """The node returned the request, since its link to a prefill node broke. Both nodes live."""

    @property
    def counts_as(self) -> NodeFailure:
        """How the node's figures count it."""
        if self in _UNREACHABLE:
            return NodeFailure.UNREACHABLE
        return NodeFailure.LOST if self in _LOSSES else NodeFailure.REFUSED

    @property
    def is_loss(self) -> bool:
        """Whether a node may have died of the request."""
        return self in _LOSSES

    @property
    def is_counted(self) -> bool:
        """Whether the failure of the node that was asked is counted already, or is none."""
        return self in _COUNTED

    @property
    def returned(self) -> bool:
        """Whether the node lives and has returned the request, so that it may be asked again at once."""
        return self in _RETURNED

    @property
    def loses_decode(self) -> bool:
        """Whether the node that was asked is lost."""
        return self.is_loss and not self.returned

    @property
    def may_come_back(self) -> bool:
        """Whether the node may be there again soon, with the answers that it stores."""
        return self in _MAY_COME_BACK


_RETURNED = frozenset({FailureKind.PREFILL_LOST, FailureKind.LINK_LOST})
_NOT_CONTINUED = frozenset({FailureKind.NOT_CONTINUED, FailureKind.NOT_CONTINUED_IN_TIME})
_UNREACHABLE = frozenset({FailureKind.UNREACHABLE, FailureKind.PROCESS_GONE})
_LOSSES = _NOT_CONTINUED | {FailureKind.LOST, FailureKind.PREFILL_LOST}
_COUNTED = _RETURNED | _NOT_CONTINUED | {FailureKind.NO_STORED_ANSWER}
_MAY_COME_BACK = _NOT_CONTINUED | {FailureKind.UNREACHABLE, FailureKind.LOST}


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """A failed attempt, after which another node may serve the request."""

    kind: FailureKind
    error: RequestError
    answer: CompleteResponse | None = None
    """The node's own answer, if it gave one."""
    prefill_lost: tuple[LostNode, ...] = ()
    """The prefill nodes that are lost, of ``PREFILL_LOST``."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request gets no answer of a node, unless one has answered with its own error."""

    error: RequestError
    answer: CompleteResponse | None = None
    """What the node said whose failure the client is to get."""
    losses: tuple[str, ...] = ()
    """How nodes were lost with the request, if it may be what they died of."""


class AttemptRule:
    """The rule for one request, which remembers its failures."""

    __slots__ = ("_asked_again_s", "_asks_again", "_failures", "_losses", "_tried", "_until_s", "_wait_s", "attempts")

    def __init__(self, wait_s: float, *, asks_again: bool = False) -> None:
        """``wait_s`` is for how long the request may wait for a node.

        ``asks_again`` says that the client asks for an answer that a node stores. Such a request has no body, and no
        node dies of it: what is lost with it is a connection.
        """
        self._wait_s = wait_s
        self._asks_again = asks_again
        self.attempts = 0
        """The attempts that have failed."""
        self._tried: frozenset[bytes] = frozenset()
        self._failures: dict[bytes, AttemptFailure] = {}
        """The last failure of each node, in their order."""
        self._losses: dict[bytes, str] = {}
        """How each node was lost, by its boot id."""
        self._asked_again_s: dict[bytes, float] = {}
        self._until_s: float | None = None
        """Until when the request waits; None as long as it has had no reason to wait."""

    def next(self, choose: Callable[[frozenset[bytes]], Route], now_s: float) -> Route | Wait | GiveUp:
        """Returns what to do after a failure. The caller calls ``give_up`` if it has waited and there is still no node.

        ``choose`` returns a route without the nodes of these boot ids, and raises RequestError if there is none.
        """
        if len(self._losses) >= MAX_LOSSES or self.attempts >= MAX_ATTEMPTS:
            return self.give_up()
        with suppress(RequestError):
            return choose(self._tried)
        if self._until_s is None:
            self._until_s = now_s + self._wait_s
        if self._asks_again:
            one_may_come = any(at_s < math.inf for at_s in self._asked_again_s.values()) and now_s < self._until_s
        else:
            one_may_come = bool(self._losses)
        if not one_may_come:
            return self.give_up()
        return Wait(self._until_s, self._asked_again_s, keeps_place=not self._asks_again)

    def failed(self, node: bytes, failure: AttemptFailure, now_s: float) -> None:
        """Notes that the attempt at ``node``, by its boot id, has failed."""
        kind = failure.kind
        self.attempts += 1
        if not kind.returned:
            self._tried |= {node}
        self._failures.pop(node, None)
        self._failures[node] = failure
        never = not kind.may_come_back if self._asks_again else kind.loses_decode
        self._asked_again_s[node] = math.inf if never else now_s + RETRY_AFTER_S
        if kind is FailureKind.NOT_CONTINUED_IN_TIME:
            self._until_s = now_s
        if kind.is_loss and not self._asks_again:
            # Two decode nodes may tell of the same prefill node.
            for lost in [prefill.boot_id for prefill in failure.prefill_lost] or [node]:
                self._losses.setdefault(lost, failure.error.message)

    def give_up(self) -> GiveUp:
        """Returns what the client gets after these failures, of which there is at least one."""
        failures = list(self._failures.values())
        # A node that stores the answer may be the one that could not be asked: then the client may try again.
        lacks_it = FailureKind.NO_STORED_ANSWER
        failure = next((one for one in reversed(failures) if one.kind is not lacks_it), failures[-1])
        losses = tuple(self._losses.values()) if len(self._losses) >= MAX_LOSSES else ()
        return GiveUp(failure.error, failure.answer, losses)


def judged(node: str, answer: CompleteResponse, content_type: str) -> CompleteResponse | AttemptFailure:
    """Returns ``answer`` if it is for the client, and otherwise the failure that it stands for.

    Raises BadUpstream for an answer that no other node would improve.
    """
    if answer.status == Unavailable.status:
        error = Unavailable(f"node {node} takes no requests now", code="upstream_busy", retry_after_s=RETRY_AFTER_S)
        return AttemptFailure(FailureKind.BUSY, error, answer if content_type == "application/json" else None)
    if answer.status == 401:
        return AttemptFailure(
            FailureKind.TICKET_REFUSED, BadUpstream(f"node {node} refused the proxy's ticket", code="ticket_refused")
        )
    if not 200 <= answer.status < 600 or 300 <= answer.status < 400 or content_type != "application/json":
        raise BadUpstream(f"node {node} gave an unexpected answer with status {answer.status}", code="upstream_invalid")
    return answer


def unreachable(node: str, *, process_gone: bool) -> AttemptFailure:
    error = Unavailable(f"node {node} cannot be reached", code="upstream_unreachable", retry_after_s=RETRY_AFTER_S)
    return AttemptFailure(FailureKind.PROCESS_GONE if process_gone else FailureKind.UNREACHABLE, error)


def lost(node: str, why: Exception, kind: FailureKind = FailureKind.LOST) -> AttemptFailure:
    return AttemptFailure(kind, BadUpstream(f"node {node} was lost before it answered: {why}", code="upstream_lost"))


def no_stored_answer(node: str, answer: CompleteResponse) -> AttemptFailure:
    error = Gone(f"node {node} does not have this answer", code="answer_not_kept")
    return AttemptFailure(FailureKind.NO_STORED_ANSWER, error, answer)


def returned(node: str, request: ReturnedRequest) -> AttemptFailure:
    """Returns the failure of a node that returns a request. It is a loss only if a prefill node is lost."""
    if request.lost:
        error = BadUpstream(f"{request.why}, says node {node}", code="upstream_lost")
        return AttemptFailure(FailureKind.PREFILL_LOST, error, prefill_lost=request.lost)
    broken = Unavailable(
        f"node {node} has lost its link to a prefill node, which lives",
        code="upstream_busy",
        retry_after_s=RETRY_AFTER_S,
    )
    return AttemptFailure(FailureKind.LINK_LOST, broken)
