"""Waits for a node that can be asked, as the registry hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from pdserve.patience import LAST_LOOK_S
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.routing.router import Route

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
