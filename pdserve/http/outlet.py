"""An application's access to its client's connection beyond ASGI, which spares the cost of ASGI's calls per request."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

OUTLET = "pdserve.outlet"
"""The name of an ASGI extension: ``scope["extensions"][OUTLET]`` is the request's ``Outlet``."""


class Cycle(Protocol):
    """uvicorn's side of one request and its response."""

    scope: Any
    default_headers: list[tuple[bytes, bytes]]
    body: bytearray
    more_body: bool
    waiting_for_100_continue: bool
    keep_alive: bool
    disconnected: bool
    response_started: bool
    response_complete: bool
    chunked_encoding: bool | None
    on_response: Callable[[], None]


class Flow(Protocol):
    """uvicorn's flow control of one connection."""

    write_paused: bool

    async def drain(self) -> None: ...

    def resume_reading(self) -> None: ...


class Outlet:
    """uvicorn's transport of one connection, for one response after the other, with more operations.

    As a context manager it gathers what is sent inside and writes it at once. The head of a response and its body,
    which ASGI sends apart, are then one system call and one packet.
    """

    __slots__ = (
        "_close",
        "_default_fields",
        "_default_lines",
        "_flow",
        "_held",
        "_takes_chunks",
        "_transport",
        "cycle",
        "fields",
        "is_closing",
        "on_disconnect",
        "task",
        "writes",
    )

    def __init__(self, transport: asyncio.Transport, flow: Flow, close: Callable[[], None]) -> None:
        """``close`` is called after a response that is its connection's last."""
        self._transport = transport
        self._close = close
        self._flow = flow
        self.cycle: Cycle | None = None
        """The cycle of the request that is answered now, or was answered last; None once the connection is lost."""
        self.fields: dict[bytes, bytes] | None = None
        """The headers of that request, whose names are in lower case; None if the server has not said them."""
        self.task: asyncio.Task[None] | None = None
        """The task that handles the request, where the server has begun one. To ask asyncio costs a system call."""
        self._held: list[bytes] | None = None
        self._takes_chunks = False
        """Whether the server has said that the client of that request speaks HTTP/1.1."""
        self._default_fields: list[tuple[bytes, bytes]] | None = None
        self._default_lines = b""
        """``_default_fields`` as lines of a head."""
        self.is_closing = transport.is_closing
        self.writes = 0
        """How often something was written for responses that are not sent at once."""
        self.on_disconnect: Callable[[], object] | None = None
        """Called once if the client leaves before its response is over, so that no task has to wait for this."""

    def __enter__(self) -> None:
        self._held = []

    def __exit__(self, *exc_info: object) -> None:
        self._release()

    def take_body(self) -> bytes | None:
        """Returns the request's body if it is complete and has not been received; None if the caller has to wait."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.disconnected:
            return None
        self._flow.resume_reading()  # a large body stops the reading
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    @property
    def paused(self) -> bool:
        """Whether the client has left so much unread that the caller should ``drain`` before it writes more."""
        return self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()

    def unread_bytes(self) -> int:
        """Returns how many written bytes wait, in this process and in the kernel, for the client's system."""
        unsent = self._transport.get_write_buffer_size()
        sock = self._transport.get_extra_info("socket")
        if sock is None or self._transport.is_closing():  # a socket that is closed has no number
            return unsent
        in_kernel = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        return unsent + int.from_bytes(in_kernel, sys.byteorder)

    def respond(self, status: int, fields: bytes, body: bytes) -> None:
        """Sends a response. ``fields`` are well-formed lines of its head, one of them its ``content-length``."""
        cycle = self.cycle
        if cycle is None or cycle.disconnected:
            return
        sent = body if cycle.scope["method"] != "HEAD" else b""
        self._transport.write(self._head(cycle, status, fields) + sent)
        self._complete(cycle)

    def begin_chunks(self, status: int, fields: bytes, data: bytes, *, more: bool) -> bool:
        """Sends the head and the first part of a response whose length is not known yet.

        ``fields`` are well-formed lines of its head. Returns False, with nothing done, where a client takes no chunks.
        """
        cycle = self.cycle
        if cycle is None or cycle.disconnected:
            return True
        if not self._takes_chunks or cycle.scope["method"] == "HEAD":
            return False
        head = self._head(cycle, status, fields + b"transfer-encoding: chunked\r\n")
        cycle.chunked_encoding = True
        self._send_chunk(cycle, head, data, more)
        return True

    def send_chunk(self, data: bytes, *, more: bool) -> bool:
        """Sends a part of a body, or its end. Returns False, with nothing done, if the response has no chunks."""
        cycle = self.cycle
        if cycle is None or cycle.disconnected:
            return True
        if not self._takes_chunks or not cycle.chunked_encoding or cycle.response_complete:
            return False
        self._send_chunk(cycle, b"", data, more)
        return True

    def write_chunk(self, data: bytes) -> bool:
        """Sends a part of a body at once, where a response without a length has begun and is not over.

        Returns False if the client has left so much unread that no more should be written until ``send`` allows it.
        """
        cycle, transport = self.cycle, self._transport
        if cycle is not None and not cycle.disconnected and not transport.is_closing():
            # A client of HTTP/1.0 gets the data without a frame.
            self.writes += 1
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)
        return not self._flow.write_paused

    def _head(self, cycle: Cycle, status: int, fields: bytes) -> bytes:
        """Begins a response, and returns its head."""
        assert not cycle.response_started
        cycle.waiting_for_100_continue = False
        cycle.response_started = True
        # The server has the same list for all answers of a second.
        if cycle.default_headers is not self._default_fields:
            self._default_fields = cycle.default_headers
            self._default_lines = b"".join([b"%b: %b\r\n" % field for field in cycle.default_headers])
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINE[status], self._default_lines, fields, end))

    def _send_chunk(self, cycle: Cycle, before: bytes, data: bytes, more: bool) -> None:
        if data:
            before += b"%x\r\n%b\r\n" % (len(data), data)
        self.write(before if more else before + b"0\r\n\r\n")
        if not more:
            self._complete(cycle)

    def _complete(self, cycle: Cycle) -> None:
        cycle.response_complete = True
        if not cycle.keep_alive:
            self._close()
        cycle.on_response()

    # ------------------------------------------------------------------ the server's side

    def write(self, data: bytes) -> None:
        self.writes += 1
        if self._held is not None:
            self._held.append(data)
        elif data:
            self._transport.write(data)

    def begin(self, cycle: Cycle, fields: dict[bytes, bytes] | None = None, *, takes_chunks: bool = False) -> None:
        """Takes over the cycle of the next request, with its headers, if each has another name."""
        self.cycle = cycle
        self.fields = fields
        self._takes_chunks = takes_chunks
        self.on_disconnect = None

    def close(self) -> None:
        self._release()
        self._close()

    def tell_disconnect(self) -> None:
        """Tells the application that the connection is lost or given up."""
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None and self.cycle is not None and not self.cycle.response_complete:
            callback()

    def let_go(self) -> None:
        """Lets go of the connection, which is lost, and of its last cycle. Both refer to the outlet.

        So no connection leaves a reference cycle behind, which would outlive it until Python looks for cycles.
        """
        self._close = _nothing
        self.cycle = self.task = self.fields = None

    def _release(self) -> None:
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))


def _nothing() -> None:
    """Closes a connection that is lost."""
