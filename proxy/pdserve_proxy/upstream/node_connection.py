"""One HTTP/1.1 connection to a node, one request on it at a time.

    FREE ──▶ request ──▶ head ──▶ body ──▶ FREE     kept for the next request
                └─────────┴────────┴──▶ closed      lost, silent for too long, not HTTP, or given up

Made for streams: whatever comes in one read from the socket wakes its reader once, however many chunks it is, and what
came before a loss is handed out before the loss is told.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import httptools

HIGH_WATER_BYTES = 2**17
"""Of a body that nobody has taken yet: from here on nothing is read from the node."""
MAX_HEAD_BYTES = 2**16
"""Of what is not body, in a row: heads, and between chunks and behind them."""
SUSPECTED_S = 1.0
"""Seconds without a byte after which a stream of a node that is thought dead is over."""
PROBE_S = 10
"""Seconds of silence after which the node's kernel is asked whether it is still there, and again after as many."""
UNANSWERED_S = 40
"""Seconds after which a connection ends whose other side acknowledges nothing, or has no room: longer than the event
loop of a node that lives may stand still.
"""
SMALL_BYTES = 2**14
"""Bodies below it are copied behind their head: that is less work than two buffers in one write."""


class NodeLost(Exception):
    """The connection ended, or was given up, before the response did."""


class NodeClosed(NodeLost):
    """The node closed the connection, or died."""


class NodeUnreachable(NodeLost):
    """No connection came about."""


class NodeResponse:
    """What a node answers to one request. One reader. ``close`` has to be called in the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, close: Callable[[NodeResponse], None]) -> None:
        self._loop = loop
        self._close = close
        self._pieces: list[bytes] = []
        self._held = 0
        self._relay: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: NodeLost | None = None
        self._on_room: Callable[[], None] | None = None
        self.status = 0
        """0 until the head is there."""
        self.headers: dict[str, str] = {}
        """Names in lower case."""
        self.complete = False

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def exhausted(self) -> bool:
        """Whether all of the body has been read."""
        return self.complete and not self._pieces

    async def head(self) -> None:
        """Wait for status and headers. Raises NodeLost."""
        while not self.status:
            await self._news()

    def take_whole(self) -> bytes | None:
        """All of the body, if all of it is there and none has been read; None where it has to be waited for."""
        return self._take() if self.complete else None

    async def read(self, relay: Callable[[bytes], bool] | None = None) -> bytes:
        """What has come of the body since the last read, at least one byte; empty at its end. Raises NodeLost.

        With ``relay``, what comes before the body's last byte is given to that instead, as it comes, and this returns
        at the end, or with nothing once ``relay`` has returned False.
        """
        self._relay = relay
        try:
            while not self._pieces and not self.complete:
                await self._news()
                if self._relay is not relay:
                    break
        finally:
            self._relay = None
        return self._take()

    def close(self) -> None:
        """Give up what has not come yet. A read that waits fails; what has come can still be read."""
        self.fail(NodeLost("the proxy closed the response"))
        self._close(self)

    # ------------------------------------------------------------------ the connection's side

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._held += len(piece)

    def is_full(self, on_room: Callable[[], None]) -> bool:
        """Whether no more should come now; then ``on_room`` is called when it may."""
        if self._held < HIGH_WATER_BYTES:
            return False
        self._on_room = on_room
        return True

    def fail(self, error: NodeLost) -> None:
        if not self.complete and self._error is None:
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Something has come, or nothing more will."""
        if self._relay is not None and self._pieces and not self.complete and self._error is None:
            if self._relay(self._take()):
                return
            self._relay = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        if self._on_room is not None:
            on_room, self._on_room = self._on_room, None
            on_room()
        return data

    def _news(self) -> asyncio.Future[None]:
        """Done when something has come, or nothing more will."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        return self._waiter


class NodeConnection(asyncio.Protocol):
    """``on_free`` is called with it whenever it can take a request again, ``on_lost`` once when it is closed."""

    def __init__(self, on_free: Callable[[NodeConnection], None], on_lost: Callable[[NodeConnection], None]) -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._response: NodeResponse | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._silence_s: float | None = None
        self._heard_s = 0.0
        self._idle_bytes = 0
        """Since the request, or the last byte of a body."""
        self._interim = False
        self._paused = False
        self._keep = False

    def request(self, head: bytes, body: bytes, silence_s: float | None) -> NodeResponse:
        """Send a request. After ``silence_s`` without a byte the node counts as lost; None waits for ever.

        Raises NodeLost if the connection is closed already.
        """
        if self._transport.is_closing():
            raise NodeClosed("the connection was closed")
        assert self._response is None
        self._idle_bytes = 0
        self._response = NodeResponse(self._loop, self._closed_by_reader)
        self._silence_s = silence_s
        if silence_s is not None:
            self._heard_s = self._loop.time()
            self._silence = self._loop.call_later(silence_s, self._check_silence)
        if len(body) < SMALL_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return self._response

    def suspect(self) -> None:
        """Its node may be dead: an answer in one piece is given up, and a stream unless bytes of it go on coming."""
        if self._response is None:
            self.close()
        elif self._silence is None or self._silence_s is None:
            self._fail("its heartbeats ended")
        else:
            self._silence.cancel()
            self._silence_s = min(self._silence_s, SUSPECTED_S)
            self._check_silence()

    def close(self) -> None:
        self._transport.abort()

    # ------------------------------------------------------------------ the transport's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP and TLS give one
        self._transport = transport
        _watch_other_side(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # a node that speaks out of turn
            self.close()
            return
        if self._silence is not None:
            self._heard_s = self._loop.time()
        self._idle_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._fail(f"not HTTP/1.1: {exc}")
            response.wake()  # where a whole answer came before it
            return
        if self._idle_bytes > MAX_HEAD_BYTES:
            self._fail(f"more than {MAX_HEAD_BYTES} bytes without any of a body")
            response.wake()
            return
        if response.complete:
            self._over()
        elif response.is_full(self._resume):
            self._paused = True
            self._transport.pause_reading()
        response.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        response = self._response
        self._let_go()
        del self._parser  # it and this keep each other alive
        if response is not None:
            response.fail(NodeClosed("the connection ended" if exc is None else str(exc) or type(exc).__name__))
        self._on_lost(self)

    # ------------------------------------------------------------------ the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._response is not None
        if self._response.complete:
            raise NodeLost("more answers than requests")
        if self._response.status:  # a trailer
            return
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._response is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._interim = True
            self._response.headers.clear()
        else:
            self._response.status = status

    def on_body(self, body: bytes) -> None:
        assert self._response is not None
        self._idle_bytes = 0
        self._response.feed(body)

    def on_message_complete(self) -> None:
        assert self._response is not None
        if self._interim:
            self._interim = False
            return
        self._response.complete = True
        self._keep = self._parser.should_keep_alive()  # known here only

    # ------------------------------------------------------------------ ends

    def _over(self) -> None:
        self._let_go()
        # A node that answers before it has the whole request may never read the rest, nor what would come behind it.
        if self._keep and not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self._on_free(self)
        else:
            self.close()

    def _fail(self, why: str) -> None:
        response = self._response
        self._let_go()
        self.close()
        if response is not None:
            response.fail(NodeLost(why))

    def _closed_by_reader(self, response: NodeResponse) -> None:
        if response is self._response:
            self._let_go()
            self.close()

    def _let_go(self) -> None:
        self._response = None
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        self._resume()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._heard_s = self._loop.time()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _check_silence(self) -> None:
        """One timer a request, put off by what came meanwhile. A node that is not read from is not silent."""
        assert self._silence_s is not None
        heard_s = self._loop.time() if self._paused else self._heard_s
        left_s = heard_s + self._silence_s - self._loop.time()
        if left_s <= 0:
            self._silence = None
            self._fail(f"silent for {self._silence_s:g} s")
        else:
            self._silence = self._loop.call_later(left_s, self._check_silence)


def _watch_other_side(connection: socket.socket) -> None:
    """A host that vanished leaves connections that nothing ends, unless the kernel asks for it now and then."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_S * 1000)
