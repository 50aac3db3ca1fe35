"""A client's request and its answer, straight over ASGI: what a relay needs of HTTP, and nothing that costs more."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from pdserve.errors import DeadlineExceeded, PayloadTooLarge
from pdserve.http_outlet import OUTLET, Outlet

Scope: TypeAlias = Mapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]
Send: TypeAlias = Callable[[dict[str, object]], Awaitable[None]]

UPLOAD_TIMEOUT_S = 60.0
REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client left before its request was whole."""


class ClientRequest:
    """One request on a connection of ``pdserve.http_guard``."""

    __slots__ = ("_headers", "_outlet", "_receive", "_send", "method", "path", "write")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        # Of a header that comes twice, the first counts.
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._outlet: Outlet = scope["extensions"][OUTLET]
        self.write = self._outlet.write_chunk
        """As ``send``, with more to come, but at once; returns False where ``send`` would have to wait next time."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]

    def header(self, name: bytes) -> str | None:
        """``name`` is in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """``callback`` is called once if the client leaves before its response is over."""
        self._outlet.on_disconnect = callback

    async def body(self, max_bytes: int) -> bytes:
        """Raises PayloadTooLarge, DeadlineExceeded and ClientGone."""
        length = self._headers.get(b"content-length")
        if length is not None and int(length) > max_bytes:
            raise _too_large(max_bytes)
        whole = self._outlet.take_body()
        if whole is not None:  # as it mostly is: then nothing has to be waited for, nor bounded
            if len(whole) > max_bytes:
                raise _too_large(max_bytes)
            return whole
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                return await self._whole_body(max_bytes)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"the request body did not come within {UPLOAD_TIMEOUT_S:.0f} s") from exc

    async def _whole_body(self, max_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            pieces.append(message["body"])
            size += len(message["body"])
            if size > max_bytes:
                raise _too_large(max_bytes)
            if not message["more_body"]:
                return b"".join(pieces)

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """The whole response. Waits while the client has left too much of what came before unread."""
        if self._outlet.paused:
            await self._outlet.drain()
        head = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        fields = f"{head}content-length: {len(body)}\r\n".encode("latin-1", "replace")
        self._outlet.respond(status, fields, body)

    async def begin(self, status: int, headers: Mapping[str, str], data: bytes, *, more: bool) -> None:
        """Status, headers and the first part of a body."""
        fields = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        with self._outlet:
            await self._send({"type": "http.response.start", "status": status, "headers": fields})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send(self, data: bytes, *, more: bool) -> None:
        """The next part of a body. Waits while the client has left too much of it unread."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def request_id(given: str | None) -> str:
    """The client's own, if it is fit for log lines, or a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is above {max_bytes} bytes")
