"""The body of a streamed response: whole events as they come, and an error event when the node is lost."""

from __future__ import annotations

import logging

from pdserve.errors import BadUpstream
from pdserve_proxy.errors import error_event
from pdserve_proxy.events import WholeEvents
from pdserve_proxy.exchange import Exchange, Outcome
from pdserve_proxy.node_connection import NodeLost, NodeResponse

log = logging.getLogger(__name__)


class EventStream:
    """An async iterator over body bytes. One reader; ends its exchange when it ends."""

    def __init__(self, exchange: Exchange, response: NodeResponse) -> None:
        self._exchange = exchange
        self._response = response
        self._events = WholeEvents()
        self._first = b""
        self._over = False

    async def open(self) -> None:
        """Wait for the first event, so that a node lost before it can still be replaced. Raises NodeLost."""
        while not self._first:
            piece = await self._response.read()
            if not piece:
                self._first, self._over = self._events.rest(), True
                return
            self._first = self._events.feed(piece)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            data, self._first = self._first, b""
            return self._counted(data)
        while not self._over:
            try:
                piece = await self._response.read()
            except NodeLost as exc:
                return self._counted(self._broken(exc))
            if not piece:
                self._over = True
                data = self._events.rest()
            else:
                data = self._events.feed(piece)
            if data:
                return self._counted(data)
        self._exchange.end(Outcome.OK)
        raise StopAsyncIteration

    def _counted(self, data: bytes) -> bytes:
        self._exchange.relayed_bytes += len(data)
        return data

    def _broken(self, exc: NodeLost) -> bytes:
        self._over = True
        exchange = self._exchange
        data = self._events.close_broken()
        if exchange.cut_short is not None:
            error, outcome = exchange.cut_short.error, exchange.cut_short.outcome
        else:
            log.warning("%s lost while streaming %s: %s", exchange.decode_name, exchange.request_id, exc or repr(exc))
            error = BadUpstream("the node that served this request was lost", code="upstream_lost")
            outcome = Outcome.UPSTREAM_LOST
        exchange.end(outcome)
        return data + error_event(error)
