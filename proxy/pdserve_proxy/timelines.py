"""Finds the timeline of a request: asks this proxy and the nodes what they remember of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from pdserve.errors import NotFound, TooManyRequests
from pdserve.tracing.timeline import joined_timeline
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.timeline import PhaseKind, Timeline, TimelinePart
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.upstream.node_command import CommandRefused, NodeCommander

log = logging.getLogger(__name__)

ANSWER_S = 2.0
"""How long a node may take to say what it remembers."""
MAX_ASKED = 64
"""The most nodes that are asked about one request. Those that the proxy sent it to come first."""
MAX_AT_ONCE = 4
"""The most timelines that are looked for at once."""

OwnParts: TypeAlias = Callable[[str], Awaitable[Sequence[TimelinePart]]]
"""Returns what the processes of this proxy remember of the requests with an id."""


class Timelines:
    """Asks, for the clients of one process of a proxy."""

    def __init__(self, registry: RegistryView, own: OwnParts, commander: NodeCommander) -> None:
        self._registry = registry
        self._own = own
        self._commander = commander
        self._searches = 0

    async def find(self, request_id: str) -> Timeline:
        """Returns the timeline of the newest request with this id.

        Raises NotFound if nobody remembers one, and TooManyRequests while others are looked for.
        """
        if self._searches >= MAX_AT_ONCE:
            raise TooManyRequests("other timelines are looked for now", code="busy", retry_after_s=1)
        self._searches += 1
        try:
            return await self._find(request_id)
        finally:
            self._searches -= 1

    async def _find(self, request_id: str) -> Timeline:
        parts = list(await self._own(request_id))
        nodes = self._asked(parts)
        silent = []
        answers = await asyncio.gather(*(self._ask(node, request_id) for node in nodes))
        for node, found in zip(nodes, answers, strict=True):
            if found is None:
                silent.append(node.name)
            else:
                parts += found
        timeline = joined_timeline(request_id, parts, time.monotonic(), time.time(), silent)
        if timeline is None:
            raise NotFound(
                f"nobody remembers a request {request_id!r}: it is not known, or too old (--kept-timelines)",
                code="no_timeline",
            )
        return timeline

    def _asked(self, parts: Sequence[TimelinePart]) -> list[NodeInfo]:
        """Returns the nodes to ask: any of them may have given blocks, or prepared to go on with the answer."""
        phases = [phase for part in parts for phase in part.phases if phase.kind is PhaseKind.ATTEMPT]
        named = {name for phase in phases for name in (phase.node, phase.prefill)}
        nodes = [node.info for node in self._registry.snapshot().nodes]
        return sorted(nodes, key=lambda node: node.name not in named)[:MAX_ASKED]

    async def _ask(self, node: NodeInfo, request_id: str) -> list[TimelinePart] | None:
        """Returns what the node remembers, on this machine's clock; None if it does not say."""
        # The first answer may come over a new connection. The second one tells the clocks apart better.
        try:
            recalled = [await self._commander.recall(request_id, node, ANSWER_S) for _ in range(2)]
        except CommandRefused as exc:
            log.info("request_id=%s %s does not say what it remembers: %s", request_id, node.name, exc)
            return None
        return min(recalled, key=_clock_error_s)


def _clock_error_s(parts: Sequence[TimelinePart]) -> float:
    return max((part.clock_error_s for part in parts), default=0.0)
