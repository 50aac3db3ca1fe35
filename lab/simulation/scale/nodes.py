"""Nodes as models of time: what their steps take is known from a profile, and an event is a request that comes or ends.

Between two events of a decode node all its requests advance by the same number of steps, so it is not necessary to look
at each step. A prefill node computes one prompt after the other. Neither runs out of blocks: a batch has as many places
as the profile says.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from lab.simulation.scale.events import Events
from pdserve.plan.profile import CacheGeometry, NodeSpeed
from pdserve.wire.discovery import Capacity, NodeHeartbeat, NodeInfo, NodeLoad, Role
from pdserve.wire.version import SPOKEN

MODEL = "m"
MAX_MODEL_LEN = 2**20


class CoarseNode:
    """What is common to all nodes: what they say of themselves, and how they die."""

    def __init__(self, number: int, role: Role, events: Events, speed: NodeSpeed, cache: CacheGeometry) -> None:
        self.info = NodeInfo(
            protocol=SPOKEN.newest,
            oldest_protocol=SPOKEN.oldest,
            name=f"{role.value}{number}",
            boot_id=number.to_bytes(16, "little"),
            role=role,
            url=f"http://node{number}:8000",
            control=f"tcp://node{number}:9000",
            model=MODEL,
            fingerprint="f",
            capacity=Capacity(cache.max_num_seqs, cache.num_blocks, cache.block_size, MAX_MODEL_LEN),
        )
        self.alive = True
        self._events = events
        self._parts = speed.steps
        self._cache = cache

    @property
    def running(self) -> int:
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        raise NotImplementedError

    def heartbeat(self, proxies: tuple[bytes, ...]) -> NodeHeartbeat:
        """Returns what the node says now to ``proxies``, all of which know it."""
        load = NodeLoad(self.running, self.waiting, self._cache.num_blocks)
        return NodeHeartbeat(self.info.boot_id, load, proxies=proxies)

    def die(self) -> None:
        """Does nothing more, and tells nobody."""
        self.alive = False


class PrefillModel(CoarseNode):
    """A node that computes prompts, in the order in which they come."""

    def __init__(self, number: int, events: Events, speed: NodeSpeed, cache: CacheGeometry) -> None:
        super().__init__(number, Role.PREFILL, events, speed, cache)
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()
        self._busy = False

    @property
    def running(self) -> int:
        return int(self._busy)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def compute(self, tokens: int, done: Callable[[], object]) -> None:
        """Calls ``done`` when a prompt of so many tokens is computed, unless the node dies before."""
        self._queue.append((tokens, done))
        if not self._busy:
            self._begin()

    def prompt_s(self, tokens: int) -> float:
        """Returns what a prompt takes by itself: each chunk reads what came before it."""
        chunks = -(-tokens // self._cache.max_num_batched_tokens)
        return chunks * self._parts.chunk_alone + tokens * self._parts.token_s(tokens / 2)

    def _begin(self) -> None:
        tokens, done = self._queue.popleft()
        self._busy = True
        self._events.after(self.prompt_s(tokens), lambda: self._end(done))

    def _end(self, done: Callable[[], object]) -> None:
        if not self.alive:
            return
        self._busy = False
        if self._queue:
            self._begin()
        done()


class DecodeModel(CoarseNode):
    """A node that writes answers, as many at a time as its batch has places."""

    def __init__(self, number: int, events: Events, speed: NodeSpeed, cache: CacheGeometry) -> None:
        super().__init__(number, Role.DECODE, events, speed, cache)
        self._numbers = itertools.count()
        self._batch: list[tuple[float, int, int, Callable[[], object]]] = []
        """The step after which each answer ends, its number, its tokens then, and whom to tell."""
        self._queue: deque[tuple[int, int, Callable[[], object]]] = deque()
        self._expected = 0
        """The requests whose prompts are computed elsewhere."""
        self._steps = 0.0
        self._context = 0.0
        self._since_s = events.now
        self._step_s = 0.0
        self._plan = 0
        """The number of the last plan for the next end: older ones do not hold any more."""

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def waiting(self) -> int:
        return len(self._queue) + self._expected

    def expect(self) -> None:
        """Takes a request, whose prompt is computed elsewhere first. ``answer`` follows."""
        self._expected += 1

    def answer(self, context: int, tokens: int, done: Callable[[], object]) -> None:
        """Calls ``done`` when so many tokens are written behind ``context``, unless the node dies before."""
        self._expected -= 1
        if len(self._batch) >= self._cache.max_num_seqs:
            self._queue.append((context, tokens, done))
            return
        self._advance()
        self._join(context, tokens, done)
        self._replan()

    def die(self) -> None:
        self._advance()
        super().die()

    def steps_so_far(self) -> float:
        """Returns how many steps the node has made: tokens that each of its answers got meanwhile."""
        self._advance()
        return self._steps

    def _join(self, context: int, tokens: int, done: Callable[[], object]) -> None:
        heapq.heappush(self._batch, (self._steps + tokens, next(self._numbers), context + tokens, done))
        self._context += context

    def _advance(self) -> None:
        now = self._events.now
        if self._batch and self.alive:
            steps = (now - self._since_s) / self._step_s
            self._steps += steps
            self._context += steps * len(self._batch)
        self._since_s = now

    def _replan(self) -> None:
        self._plan += 1
        if self._batch:
            self._step_s = self._parts.step_s(len(self._batch), self._context, 0)
            plan = self._plan
            self._events.after((self._batch[0][0] - self._steps) * self._step_s, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan or not self.alive:
            return
        self._advance()
        end, _, context, done = heapq.heappop(self._batch)
        self._steps = max(self._steps, end)
        self._context -= context
        if self._queue:
            self._join(*self._queue.popleft())
        self._replan()
        done()
