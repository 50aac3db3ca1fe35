"""Relays the body of a streamed response: whole server-sent events, and an error event when the node is lost.

The relay looks for the ends of events only and does not parse them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdserve.errors import BadUpstream
from pdserve.http.errors import error_event
from pdserve_proxy.relay.relayed_request import RelayedRequest, RelayOutcome
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse

MAX_EVENT_BYTES = 2**20

_ENDINGS = (b"\n\n", b"\r\n\r\n")
_LONGEST_ENDING = 4


class WholeEvents:
    """Passes a byte stream on in pieces that end where an event ends.

    A client then never holds half an event when its stream breaks, and an error event can always follow. Nodes write
    whole events, so nearly every piece passes unchanged. At most ``MAX_EVENT_BYTES`` of an event are held back. The
    work per byte is constant, however the stream is cut.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """The pieces of an event whose end has not come."""
        self._held_bytes = 0
        self._tail = b""
        """The last bytes of that event, which may be the beginning of its ending."""
        self._inside = False
        """Whether the client has the beginning of that event already."""

    def feed(self, piece: bytes) -> bytes:
        """Returns the bytes that can be sent on now, which may be none."""
        seam = self._tail + piece if self._tail else piece
        if seam.endswith(_ENDINGS):
            return self._release(piece, b"")
        end = max(seam.rfind(ending) + len(ending) if ending in seam else 0 for ending in _ENDINGS)
        if end:
            end -= len(seam) - len(piece)
            rest = piece[end:]
            out = self._release(piece[:end], rest)
            if len(rest) <= MAX_EVENT_BYTES:
                self._hold(rest)
                return out
            self._inside = True
            return out + rest
        self._hold(piece)
        self._tail = seam[1 - _LONGEST_ENDING :]
        if self._held_bytes <= MAX_EVENT_BYTES:
            return b""
        held = self._take()
        self._inside = True
        return held

    def rest(self) -> bytes:
        """Returns the bytes that are held back, for a stream that ended in good order."""
        return self._take()

    def close_broken(self) -> bytes:
        """Drops the bytes that are held back, and returns what has to precede an error event in a broken stream."""
        self._take()
        return b"\n\n" if self._inside else b""

    def _release(self, last: bytes, rest: bytes) -> bytes:
        """Returns the held bytes and ``last``, which ends an event. ``rest`` begins the next event."""
        self._tail = rest[1 - _LONGEST_ENDING :]
        self._inside = False
        return self._take() + last if self._held else last

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)

    def _take(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return held


log = logging.getLogger(__name__)


class EventStream:
    """The body of one streamed response, for one reader.

    The reader calls ``open``, sends ``first``, calls ``next`` until ``over`` is true, and then ``end``.
    """

    def __init__(self, relayed: RelayedRequest, response: NodeResponse) -> None:
        self._relayed = relayed
        self._response = response
        self._events = WholeEvents()
        self.first = b""
        self.over = False
        """Whether the bytes that were returned last are the end of the body."""

    async def open(self) -> None:
        """Waits for the first event, so that a node lost before it can still be replaced. Raises NodeLost."""
        while not self.first and not self.over:
            self.first = self._whole(await self._response.read())
        self._relayed.relayed_bytes += len(self.first)

    async def next(self, write: Callable[[bytes], bool]) -> bytes:
        """Returns whole events, or nothing if there are none now; after a loss, the last event is an error event.

        Events in the middle of a stream go to ``write`` as they come, without waking the task that waits here, until
        ``write`` returns False.
        """

        def relay(piece: bytes) -> bool:
            data = self._events.feed(piece)
            self._relayed.relayed_bytes += len(data)
            return not data or write(data)

        try:
            data = self._whole(await self._response.read(relay))
        except NodeLost as exc:
            data = self._broken(exc)
        self._relayed.relayed_bytes += len(data)
        return data

    def end(self) -> None:
        """Ends the request, whose client has the whole body, unless a loss has ended it already."""
        self._relayed.end(RelayOutcome.OK)

    def _whole(self, piece: bytes) -> bytes:
        data = self._events.feed(piece) if piece else b""
        if self._response.exhausted:
            self.over = True
            data += self._events.rest()
        return data

    def _broken(self, exc: NodeLost) -> bytes:
        self.over = True
        relayed = self._relayed
        data = self._events.close_broken()
        if relayed.cut_short is not None:
            error, outcome = relayed.cut_short.error, relayed.cut_short.outcome
        else:
            reason = exc or repr(exc)
            log.warning(
                "request_id=%s decode=%s lost while streaming: %s", relayed.request_id, relayed.decode_name, reason
            )
            error = BadUpstream("the node that served this request was lost", code="upstream_lost")
            outcome = RelayOutcome.UPSTREAM_LOST
        relayed.end(outcome)
        return data + error_event(error)
