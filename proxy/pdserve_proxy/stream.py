"""The body of a streamed response: whole events as they come, and an error event when the node is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdserve.errors import BadUpstream
from pdserve_proxy.errors import error_event
from pdserve_proxy.events import WholeEvents
from pdserve_proxy.exchange import Exchange, Outcome
from pdserve_proxy.node_connection import NodeLost, NodeResponse

log = logging.getLogger(__name__)


class EventStream:
    """Body bytes, as they come: ``open``, then ``first``, then ``next`` until ``over``, then ``end``. One reader."""

    def __init__(self, exchange: Exchange, response: NodeResponse) -> None:
        self._exchange = exchange
        self._response = response
        self._events = WholeEvents()
        self.first = b""
        self.over = False
        """What was given last is the end of the body."""

    async def open(self) -> None:
        """Wait for the first event, so that a node lost before it can still be replaced. Raises NodeLost."""
        while not self.first and not self.over:
            self.first = self._whole(await self._response.read())
        self._exchange.relayed_bytes += len(self.first)

    async def next(self, write: Callable[[bytes], bool]) -> bytes:
        """Whole events; empty if there are none now. What a lost node leaves is an error event.

        Events in the middle of a stream go to ``write`` as they come, without a turn of the task that waits here, until
        ``write`` returns False.
        """

        def relay(piece: bytes) -> bool:
            data = self._events.feed(piece)
            self._exchange.relayed_bytes += len(data)
            return not data or write(data)

        try:
            data = self._whole(await self._response.read(relay))
        except NodeLost as exc:
            data = self._broken(exc)
        self._exchange.relayed_bytes += len(data)
        return data

    def end(self) -> None:
        """The client has got all of it. Ends the exchange, unless a loss has."""
        self._exchange.end(Outcome.OK)

    def _whole(self, piece: bytes) -> bytes:
        data = self._events.feed(piece) if piece else b""
        if self._response.exhausted:
            self.over = True
            data += self._events.rest()
        return data

    def _broken(self, exc: NodeLost) -> bytes:
        self.over = True
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
