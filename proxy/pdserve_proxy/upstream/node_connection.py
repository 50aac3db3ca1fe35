"""One HTTP/1.1 connection to a node, one request on it at a time.

    FREE ──▶ request ──▶ head ──▶ body ──▶ FREE     kept for the next request
                └─────────┴────────┴──▶ closed      lost, silent for too long, not HTTP, or closed by its reader

Each read from the socket wakes the response's reader once, however many chunks it brings. The reader gets all bytes
that came before a loss before it gets the loss.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Mapping

import httptools

from pdserve.patience import LAST_LOOK_S, PatientTimer

HIGH_WATER_BYTES = 2**17
"""The bytes of a body that wait for their reader when the connection stops reading from the node."""
MAX_HEAD_BYTES = 2**16
"""The bytes in a row that may belong to no body: heads, and what is between chunks and behind them."""
SUSPECTED_S = 1.0
"""Seconds without a byte after which a stream of a suspected node is over."""
PROBE_S = 10
"""Seconds of silence after which, and at which intervals, the kernel probes whether the node's host is there."""
UNANSWERED_S = 40
"""Seconds after which a connection ends whose other side acknowledges nothing, or has no room.

The event loop of a living node never hangs for so long.
"""
SMALL_BYTES = 2**14
"""A body below this size is copied behind its head, which is less work than two buffers in one write."""


class NodeLost(Exception):
    """The connection ended, or its reader closed it, before the response ended.

    ``heard_s`` is when the node was last heard, on the event loop's clock; None if nobody knows.
    """

    def __init__(self, why: str, heard_s: float | None = None) -> None:
        super().__init__(why)
        self.heard_s = heard_s


class NodeClosed(NodeLost):
    """The node closed the connection, or died."""


class NodeUnreachable(NodeLost):
    """No connection could be made."""


class NodeRefused(NodeUnreachable):
    """No connection could be made: nobody listens at the node's address."""


class NodeResponse:
    """A node's response to one request, for one reader, who has to call ``close`` in the end."""

    __slots__ = (
        "_close",
        "_error",
        "_held",
        "_loop",
        "_on_room",
        "_pieces",
        "_relay",
        "_waiter",
        "complete",
        "headers",
        "status",
    )

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
        """The HTTP status; 0 until the head has come."""
        self.headers: dict[str, str] = {}
        """The headers, whose names are in lower case."""
        self.complete = False

    @property
    def content_type(self) -> str:
        """The media type without its parameters."""
        return media_type(self.headers)

    @property
    def exhausted(self) -> bool:
        """Whether all of the body has been read."""
        return self.complete and not self._pieces

    def take_complete(self) -> bytes | None:
        """Returns the body if all of it has come and none has been read, and otherwise None."""
        return self._take() if self.complete else None

    async def read(self, relay: Callable[[bytes], bool] | None = None) -> bytes:
        """Returns the bytes of the body that came since the last read, at least one; none at its end.

        With ``relay``, bytes before the body's last go to it as they come, and ``read`` returns at the end, or with no
        bytes once ``relay`` has returned False.

        Raises NodeLost.
        """
        self._relay = relay
        try:
            while not self._pieces and not self.complete:
                await self.next_news()
                if self._relay is not relay:
                    break
        finally:
            self._relay = None
        return self._take()

    def close(self) -> None:
        """Ends the response. A read that waits fails; bytes that have come can still be read."""
        if not self.complete:  # the connection has let go of one that is
            self.fail(NodeLost("the proxy closed the response"))
            self._close(self)

    def after_next(self, within_s: float, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once: when the next bytes have been relayed, or ``within_s`` from now at the latest."""
        timer = self._loop.call_later(within_s, callback)
        relay = self._relay
        if relay is None:
            return

        def relay_last(piece: bytes) -> bool:
            self._relay = relay
            if not timer.cancelled() and self._loop.time() < timer.when():
                timer.cancel()
                self._loop.call_soon(callback)
            return relay(piece)

        self._relay = relay_last

    # ------------------------------------------------------------------ the connection's side

    def relay_at_once(self, piece: bytes) -> bool:
        """Passes ``piece`` to the relay of a reader that waits, and wakes it if that asks for no more.

        Returns False, with nothing done, if there is no relay, or if ``piece`` is the body's last.
        """
        relay = self._relay
        if relay is None or self.complete:
            return False
        if not relay(piece):
            self._relay = None
            self.wake()
        return True

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._held += len(piece)

    def is_full(self, on_room: Callable[[], None]) -> bool:
        """Returns whether no more should come now. If so, ``on_room`` is called when more may come."""
        if self._held < HIGH_WATER_BYTES:
            return False
        self._on_room = on_room
        return True

    def fail(self, error: NodeLost) -> None:
        if not self.complete and self._error is None:
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Wakes the reader, because bytes have come or nothing more will."""
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

    def next_news(self) -> asyncio.Future[None]:
        """Returns a future that is done when bytes have come or nothing more will. Raises NodeLost after a loss."""
        if self._error is not None:
            # A new error: the one that is kept would keep alive what its readers have in their frames, and they this.
            raise type(self._error)(str(self._error), self._error.heard_s)
        self._waiter = self._loop.create_future()
        return self._waiter


class NodeConnection(asyncio.Protocol):
    """A connection that calls ``on_free`` whenever it can take a request again, and ``on_lost`` when it is closed.

    It calls ``on_request`` when it has a request that ``send`` has to send soon.
    """

    def __init__(
        self,
        on_request: Callable[[NodeConnection], None],
        on_free: Callable[[NodeConnection], None],
        on_lost: Callable[[NodeConnection], None],
    ) -> None:
        self._on_request = on_request
        self._on_free = on_free
        self._on_lost = on_lost
        self._unsent = b""
        self._loop = asyncio.get_running_loop()
        self._arrived: list[bytes] = []
        """The parts of a body that the parser has found in the bytes that it was given last."""
        # The parser appends each part itself: a method of Python's would be a call for every token of every client.
        self.on_body = self._arrived.append
        self._response: NodeResponse | None = None
        self._silence: PatientTimer | None = None
        self._silence_s: float | None = None
        self._suspected = False
        """Whether the node's heartbeats have ended since the request."""
        self._heard_s = 0.0
        self._idle_bytes = 0
        """The bytes that have come since the request, or since the last byte of a body."""
        self._interim = False
        self._paused = False
        self._keep = False

    def request(self, head: bytes, body: bytes, silence_s: float | None) -> NodeResponse:
        """Sends a request. After ``silence_s`` without a byte the node counts as lost; None waits without a bound.

        Raises NodeLost if the connection is closed already.
        """
        if self._transport.is_closing():
            raise NodeClosed("the connection was closed")
        assert self._response is None
        self._idle_bytes = 0
        self._response = NodeResponse(self._loop, self._closed_by_reader)
        self._silence_s, self._suspected = silence_s, False
        if silence_s is not None:
            self._heard_s = self._loop.time()
            self._silence = PatientTimer(self._loop, silence_s, self._check_silence)
        if len(body) < SMALL_BYTES:
            self._unsent = head + body
            self._on_request(self)
        else:
            self._transport.writelines((head, body))
        return self._response

    def send(self) -> None:
        """Sends the request for which ``on_request`` was called, unless the connection is closed already."""
        unsent, self._unsent = self._unsent, b""
        if not self._transport.is_closing():
            self._transport.write(unsent)

    def suspect(self) -> None:
        """Fails the response of a node that may be dead: a stream once it is silent, any other answer at once."""
        if self._response is None:
            self.close()
        elif self._silence is None or self._silence_s is None:
            self._fail("its heartbeats ended")
        else:
            self._silence.cancel()
            self._silence_s, self._suspected = min(self._silence_s, SUSPECTED_S), True
            # This process may have been late itself, and has not yet read what came from the node.
            self._wait_for_news(max(self._left_s(), LAST_LOOK_S))

    def close(self) -> None:
        self._transport.abort()

    # ------------------------------------------------------------------ the transport's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP and TLS give one
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)  # it and this keep each other alive, until the end
        _probe_other_side(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # the node sends bytes that no request asked for
            self.close()
            return
        if self._silence is not None:
            self._heard_s = self._loop.time()
        self._idle_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if self._arrived:
                response.feed(self._take_arrived())
            self._fail(f"not HTTP/1.1: {exc}")
            response.wake()  # a whole answer may have come before it
            return
        if self._arrived:
            piece = self._take_arrived()
            if response.relay_at_once(piece):
                return  # so it is with every token of a stream but the last
            response.feed(piece)
        if self._idle_bytes > MAX_HEAD_BYTES:
            self._fail(f"more than {MAX_HEAD_BYTES} bytes without any of a body")
            response.wake()
            return
        if response.complete:
            self._finish()
        elif response.is_full(self._resume):
            self._paused = True
            self._transport.pause_reading()
        response.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        response = self._response
        self._release()
        del self._parser
        if response is not None:
            why = "the connection ended" if exc is None else str(exc) or type(exc).__name__
            response.fail(NodeClosed(why, self._last_heard_s()))
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

    def on_message_complete(self) -> None:
        assert self._response is not None
        if self._interim:
            self._interim = False
            return
        self._response.complete = True
        self._keep = self._parser.should_keep_alive()  # known here only

    def _take_arrived(self) -> bytes:
        self._idle_bytes = 0
        arrived = self._arrived
        piece = arrived[0] if len(arrived) == 1 else b"".join(arrived)
        arrived.clear()
        return piece

    # ------------------------------------------------------------------ ends

    def _finish(self) -> None:
        self._release()
        # A node that answers before it has the whole request may never read the rest, nor what would come behind it.
        if self._keep and not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self._on_free(self)
        else:
            self.close()

    def _fail(self, why: str) -> None:
        response = self._response
        self._release()
        self.close()
        if response is not None:
            response.fail(NodeLost(why, self._last_heard_s()))

    def _last_heard_s(self) -> float | None:
        return None if self._silence_s is None else self._heard_s

    def _closed_by_reader(self, response: NodeResponse) -> None:
        if response is self._response:
            self._release()
            self.close()

    def _release(self) -> None:
        self._response = None
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if self._paused:
            self._resume()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._heard_s = self._loop.time()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _check_silence(self) -> None:
        """Fails a node that is silent for too long, and otherwise sets the request's one timer again.

        A node that the connection does not read from is not silent.
        """
        left_s = self._left_s()
        if left_s <= 0:
            self._silence = None
            after = " after its heartbeats ended" if self._suspected else ""
            self._fail(f"silent for {self._silence_s:g} s{after}")
        else:
            self._wait_for_news(left_s)

    def _left_s(self) -> float:
        """Returns the seconds for which the node may still be silent."""
        assert self._silence_s is not None
        now = self._loop.time()
        return (now if self._paused else self._heard_s) + self._silence_s - now

    def _wait_for_news(self, seconds: float) -> None:
        self._silence = PatientTimer(self._loop, seconds, self._check_silence)


def media_type(headers: Mapping[str, str]) -> str:
    """Returns what these headers say of the type of a body, without its parameters."""
    return _without_parameters(headers.get("content-type", ""))


@functools.lru_cache(maxsize=64)
def _without_parameters(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _probe_other_side(connection: socket.socket) -> None:
    """Has the kernel probe the other side: nothing else ends the connections of a host that vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_S * 1000)
