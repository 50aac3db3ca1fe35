"""Waits for a node that can be asked, as the registry hears of it.

A node that was stopped for a while, or whose connections were cut, still has the answers that it stores. A client that
asks for one by an event's id waits for it, as the client of a stream waits for another node. So does a request that was
lost before its first byte: any node can begin it again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from pdserve.errors import Unavailable
from pdserve.patience import LAST_LOOK_S
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.dispatch import Dispatch
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.routing.router import Route, RouteQuery

PAUSE_S = 0.1
"""Seconds between a change of the registry and the next look at it: changes of many nodes come together."""
_EARLY_S = 0.001
"""uvloop counts in milliseconds: a timer may come by so much too soon."""
MAX_WAITS = 32
"""The requests of one process that wait at once."""
MAX_WAITS_OF_ONE = 4
"""The requests of one client that wait at once: ids of answers that never were cost nothing to make up."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No node is left that a request can ask now. One may come, or come back. Times are of the event loop's clock."""

    until_s: float
    asked_again_s: Mapping[bytes, float]
    """When each node may be asked again that was asked already, by its boot id; infinity for those that may not be."""
    keeps_place: bool
    """Whether the request keeps its place among the admitted ones: not if its answer had one when it was computed."""


class RouteWait:
    """Looks for routes again each time that the registry of one proxy process has changed."""

    def __init__(self, registry: RegistryView) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        """Set when the registry has changed since somebody last looked for a route."""
        registry.on_change(self._changed.set)
        registry.on_node(lambda boot_id: self._changed.set())

    async def route(
        self, choose: Callable[[], Route | None], until_s: float, look_at_s: Collection[float] = ()
    ) -> Route | None:
        """Returns what ``choose`` returns when that is a route; None if it was none until ``until_s``.

        It looks at the times ``look_at_s`` too, which are of the event loop's clock, as ``until_s`` is. It looks once
        more behind them all: this process may have been stopped, and not have heard yet of a node that came meanwhile.
        """
        is_last = False
        while True:
            self._changed.clear()
            route = choose()
            now_s = self._loop.time() + _EARLY_S
            if route is not None or is_last:
                return route
            is_last = now_s >= until_s
            if is_last:
                await asyncio.sleep(LAST_LOOK_S)
                continue
            later_s = [at_s for at_s in look_at_s if at_s > now_s]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min([until_s, *later_s])):
                    await self._changed.wait()
                    await asyncio.sleep(PAUSE_S)


class NodeWaits:
    """The waits of one proxy process for a node that takes a request from its beginning, or stores its answer."""

    def __init__(self, dispatch: Dispatch, waits: RouteWait) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: Counter[bytes] = Counter()
        """How many requests of each client wait without a place; clients of whom none waits are not in it."""
        self._dispatch = dispatch
        self._waits = waits

    async def route(self, relayed: RelayedRequest, query: RouteQuery, client: bytes, wait: Wait) -> Route | None:
        """Returns a route to a node that may be asked, when there is one.

        Returns None if there is none in time, or if too many requests wait that have left their places. Of those that
        keep their places, no more wait than are admitted.
        """
        if wait.keeps_place:
            return await self._route(relayed, query, wait)
        if self._waiting.total() >= MAX_WAITS or self._waiting[client] >= MAX_WAITS_OF_ONE:
            return None
        relayed.release_place()
        self._waiting[client] += 1
        try:
            return await self._route(relayed, query, wait)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    async def _route(self, relayed: RelayedRequest, query: RouteQuery, wait: Wait) -> Route | None:
        again_s = wait.asked_again_s
        return await self._waits.route(lambda: self._choose(relayed, query, again_s), wait.until_s, again_s.values())

    def _choose(self, relayed: RelayedRequest, query: RouteQuery, asked_again_s: Mapping[bytes, float]) -> Route | None:
        now_s = self._loop.time()
        excluded = frozenset(boot_id for boot_id, at_s in asked_again_s.items() if at_s > now_s)
        try:
            return self._dispatch.choose(relayed, query, excluded)
        except Unavailable:
            return None
