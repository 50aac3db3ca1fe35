"""Waits for a node that could not be asked for the rest of an answer, which nobody else has.

A node that was stopped for a while, or whose connections were cut, still has the answers that it keeps. A client that
asks for one by an event's id waits for it, as the client of a stream waits for another node.
"""

from __future__ import annotations

import asyncio

from pdserve.config import RelayConfig
from pdserve.errors import Unavailable
from pdserve_proxy.relay.dispatch import Dispatch
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.relay.route_wait import PAUSE_S, RouteWait
from pdserve_proxy.routing.router import Route, RouteQuery

MAX_WAITS = 32
"""The requests of one process that wait at once."""


class MissedNodes:
    """The waits of one proxy process."""

    def __init__(self, config: RelayConfig, dispatch: Dispatch, waits: RouteWait) -> None:
        self._loop = asyncio.get_running_loop()
        self._wait_s = config.resume_wait_s
        self._room = MAX_WAITS
        self._dispatch = dispatch
        self._waits = waits

    def until_s(self) -> float:
        """Returns until when a request waits whose first node was missed just now."""
        return self._loop.time() + self._wait_s

    async def route(
        self, relayed: RelayedRequest, query: RouteQuery, asked: frozenset[bytes], until_s: float
    ) -> Route | None:
        """Returns a route to a node that is not among the ``asked`` ones, when there is one.

        Returns None if there is none in time, or too many requests wait. The request gives its place back: the answer
        that it asks for had one when it was computed.
        """
        if not self._room or self._loop.time() + PAUSE_S >= until_s:
            return None
        relayed.give_place_back()
        self._room -= 1
        try:
            await asyncio.sleep(PAUSE_S)
            return await self._waits.route(lambda: self._choose(relayed, query, asked), until_s)
        finally:
            self._room += 1

    def _choose(self, relayed: RelayedRequest, query: RouteQuery, asked: frozenset[bytes]) -> Route | None:
        try:
            return self._dispatch.choose(relayed, query, asked)
        except Unavailable:
            return None
