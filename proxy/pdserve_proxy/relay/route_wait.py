"""Waits for a node that can be asked, as the registry hears of it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from pdserve.config import RelayConfig
from pdserve.errors import Unavailable
from pdserve.patience import LAST_LOOK_S
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.dispatch import Dispatch
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route, RouteQuery

PAUSE_S = 0.1
"""Seconds between a change of the registry and the next look at it: changes of many nodes come together."""
_EARLY_S = 0.001
"""uvloop counts in milliseconds: a timer may come by so much too soon."""


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


MAX_WAITS = 32
"""The requests of one process that wait at once."""
MAX_WAITS_OF_ONE = 4
"""The requests of one client that wait at once: ids of answers that never were cost nothing to make up."""


class MissedNodes:
    """The waits of one proxy process."""

    def __init__(self, config: RelayConfig, dispatch: Dispatch, waits: RouteWait) -> None:
        self._loop = asyncio.get_running_loop()
        self._wait_s = config.resume_wait_s
        self._waiting: Counter[bytes] = Counter()
        """How many requests of each client wait; clients of whom none waits are not in it."""
        self._dispatch = dispatch
        self._waits = waits

    def until_s(self) -> float:
        """Returns until when a request waits whose first node was missed just now."""
        return self._loop.time() + self._wait_s

    def again_s(self) -> float:
        """Returns when a node that was missed just now may be asked again: one that breaks connections is spared."""
        return self._loop.time() + RETRY_AFTER_S

    async def route(
        self,
        relayed: RelayedRequest,
        query: RouteQuery,
        client: bytes,
        asked_again_s: Mapping[bytes, float],
        until_s: float,
    ) -> Route | None:
        """Returns a route to a node that may be asked, when there is one.

        ``asked_again_s`` says when each node may be that was asked already; infinity for those that need not be, since
        they do not have the answer.

        Returns None if no node was missed, none can be asked in time, or too many requests wait. The request gives its
        place back: the answer that it asks for had one when it was computed.
        """
        missed = any(at_s < math.inf for at_s in asked_again_s.values())
        if not missed or self._loop.time() >= until_s or not self._has_room(client):
            return None
        relayed.give_place_back()
        self._waiting[client] += 1
        try:
            return await self._waits.route(
                lambda: self._choose(relayed, query, asked_again_s), until_s, asked_again_s.values()
            )
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]

    async def another(
        self, relayed: RelayedRequest, query: RouteQuery, asked_again_s: Mapping[bytes, float], until_s: float
    ) -> Route | None:
        """Returns a route for a request that was lost with its node, when there is one; None if there is none in time.

        ``asked_again_s`` says when each node may be that was asked already; infinity for those that were lost. The
        request keeps its place, so no more wait than are admitted.
        """
        return await self._waits.route(
            lambda: self._choose(relayed, query, asked_again_s), until_s, asked_again_s.values()
        )

    def _has_room(self, client: bytes) -> bool:
        return self._waiting.total() < MAX_WAITS and self._waiting[client] < MAX_WAITS_OF_ONE

    def _choose(self, relayed: RelayedRequest, query: RouteQuery, asked_again_s: Mapping[bytes, float]) -> Route | None:
        now_s = self._loop.time()
        excluded = frozenset(boot_id for boot_id, at_s in asked_again_s.items() if at_s > now_s)
        try:
            return self._dispatch.choose(relayed, query, excluded)
        except Unavailable:
            return None
