"""Waits for a node where none is left that can be asked.

A node that was stopped for a while, or whose connections were cut, still has the answers that it keeps. A client that
asks for one by an event's id waits for it, as the client of a stream waits for another node. So does a request that was
lost before its first byte: any node can begin it again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping

from pdserve.config import RelayConfig
from pdserve.errors import Unavailable
from pdserve_proxy.relay.dispatch import Dispatch
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.relay.route_wait import RouteWait
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route, RouteQuery

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
