"""uvicorn's HTTP protocol with bounds on what comes before a request: its head.

uvicorn limits neither the size of a request's headers nor the time that a client takes over them, and starts its
keep-alive timer only after a first response. Both servers of pdserve are started with this class instead.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_BODY = (
    b'{"error":{"message":"the request line and headers are larger than %d bytes",'
    b'"type":"invalid_request_error","param":null,"code":"headers_too_large"}}'
)


class GuardedHttp(HttpToolsProtocol):
    """Answers 431 to a head over ``max_head_bytes``, closes a connection whose head takes over ``head_timeout_s``."""

    max_head_bytes: ClassVar[int] = 65_536
    head_timeout_s: ClassVar[float] = 20.0

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            self._arm()
        super().data_received(data)
        if self._in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            if not self._answering:
                body = _BODY % self.max_head_bytes
                self.transport.write(_TOO_LARGE % (len(body), body))
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._expire)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expire(self) -> None:
        self._head_timer = None
        if self._answering:
            self._arm()
        elif self._in_head and not self.transport.is_closing():
            self.transport.close()
