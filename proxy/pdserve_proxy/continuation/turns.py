"""Lets streams of lost nodes go on a few at a time, so that those who wait for a first token can go on, too.

Most of a resume is the work of a prefill node: it computes the prompt and what was written behind it again. Of more
resumes at once than prefill nodes can compute none is over sooner, and each new prompt waits behind all of them. So
their number goes by the nodes that compute prompts, and by how many processes of how many proxies share these.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve_proxy.registry.snapshot import RegistryView, Serving

RESUMES_A_NODE = 2
"""Streams that are resumed at once for each node that computes prompts: one is computed, one waits there."""
MAX_TURN_S = 10.0
"""A turn ends after so many seconds. Its stream goes on to wait for its node, whose engine may stand still."""


class ResumeLimit:
    """How many streams one process may resume at once, as the cluster is now."""

    def __init__(self, fixed: int, registry: RegistryView, processes: int) -> None:
        """``fixed`` is the number if it is not 0. ``processes`` is how many this proxy has."""
        self._fixed = fixed
        self._registry = registry
        self._processes = processes
        self._seen: Serving | None = None
        self._nodes = 0
        self._proxies = 0
        """How many proxies there were at the last look."""

    @property
    def shared_otherwise(self) -> bool:
        """Whether more or fewer proxies share the turns than at the last look."""
        return not self._fixed and self._registry.live_proxies != self._proxies

    def now(self) -> int:
        """Returns the number; at least 1."""
        if self._fixed:
            return self._fixed
        serving = self._registry.serving()
        if serving is not self._seen:
            self._seen, self._nodes = serving, prompt_nodes(serving)
        self._proxies = self._registry.live_proxies
        return max(1, -(-RESUMES_A_NODE * self._nodes // (self._processes * self._proxies)))


def prompt_nodes(serving: Serving) -> int:
    """Returns how many nodes compute prompts now, of all models: decode nodes too where no other does."""
    nodes: set[bytes] = set()
    for pairings in serving.pairings.values():
        # All decode nodes of a fingerprint share one tuple.
        for fitting in {id(pair.fitting): pair.fitting for pair in pairings}.values():
            nodes.update(node.boot_id for node in fitting)
        nodes.update(pair.decode.boot_id for pair in pairings if not pair.fitting)
    return len(nodes)


class ResumeTurn:
    """The turn of one stream."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end: Callable[[], None] | None = on_end

    def end(self) -> None:
        """Gives the turn to the next one. Every call but the first does nothing."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class ResumeTurns:
    """Gives turns to as many streams as ``limit`` says now, in the order in which they came."""

    def __init__(self, limit: ResumeLimit) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def none_left(self) -> bool:
        """Whether who comes now has to wait."""
        return bool(self._waiting) or self._taken >= self._limit.now()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[ResumeTurn]:
        """Waits for a turn, which ends with its block, or after ``MAX_TURN_S``."""
        await self._wait()
        turn = ResumeTurn(self._end)
        timer = asyncio.get_running_loop().call_later(MAX_TURN_S, turn.end)
        try:
            yield turn
        finally:
            timer.cancel()
            turn.end()

    async def _wait(self) -> None:
        if not self.none_left:
            self._taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._end()  # it came in the same moment
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def give(self) -> None:
        """Gives turns that have become free, also because the limit has grown."""
        most = self._limit.now() if self._waiting else 0
        while self._waiting and self._taken < most:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)

    def heard(self, boot_id: bytes) -> None:
        """Gives turns that are there because fewer proxies share them, which a node may just have told.

        A change of the nodes comes to ``give``, once for many of them.
        """
        if self._waiting and self._limit.shared_otherwise:
            self.give()

    def _end(self) -> None:
        self._taken -= 1
        self.give()
