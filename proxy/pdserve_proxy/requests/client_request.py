"""A client's request and its answer, straight over ASGI: what a relay needs of HTTP, and nothing that costs more."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from pdserve.errors import PayloadTooLarge, RequestTimeout
from pdserve.http.outlet import OUTLET, Outlet
from pdserve_proxy.requests.held_bodies import HeldBody

Scope: TypeAlias = Mapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]
Send: TypeAlias = Callable[[dict[str, object]], Awaitable[None]]

UPLOAD_TIMEOUT_S = 60.0
PIECE_BYTES = 64 * 1024
"""Of an answer, written at once: as much as a client may leave unread before its connection counts as full."""
REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client left before its request was whole."""


class ClientRequest:
    """One request on a connection of ``pdserve.http.guard``."""

    __slots__ = ("_headers", "_outlet", "_receive", "_send", "address", "method", "path", "write")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        # Of a header that comes twice, the first counts.
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._outlet: Outlet = scope["extensions"][OUTLET]
        self.write = self._outlet.write_chunk
        """As ``send``, with more to come, but at once; returns False where ``send`` would have to wait next time."""
        client = scope["client"]
        self.address: str = client[0] if client else ""
        """Of the client; empty where it has none."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]

    def header(self, name: bytes) -> str | None:
        """``name`` is in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """``callback`` is called once if the client leaves before its response is over."""
        self._outlet.on_disconnect = callback

    async def body(self, max_bytes: int, held: HeldBody) -> bytes:
        """All of it. ``held`` is told what comes of it, and whether it has to be waited for.

        Raises PayloadTooLarge, RequestTimeout, ClientGone, and what ``held`` raises.
        """
        length = self._headers.get(b"content-length")
        # Zeros before a number are legal, and so many that int() would refuse them.
        if length is not None and (len(digits := length.lstrip(b"0")) > 18 or int(digits or b"0") > max_bytes):
            raise _too_large(max_bytes)
        whole = self._outlet.take_body()
        if whole is not None:  # as it mostly is: then nothing has to be waited for, nor bounded
            if len(whole) > max_bytes:
                raise _too_large(max_bytes)
            held.add(len(whole))
            return whole
        held.arrive()
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                body = await self._whole_body(max_bytes, held)
        except TimeoutError as exc:
            raise RequestTimeout(
                f"the request body did not come within {UPLOAD_TIMEOUT_S:g} s", code="upload_timeout"
            ) from exc
        held.arrived()
        return body

    async def _whole_body(self, max_bytes: int, held: HeldBody) -> bytes:
        # Not a list of pieces: each has a header, which is most of it where a client sends a few bytes at a time.
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            piece = message["body"]
            if len(body) + len(piece) > max_bytes:
                raise _too_large(max_bytes)
            held.add(len(piece))
            body += piece
            if not message["more_body"]:
                return bytes(body)

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """The whole response. Returns when the client has taken all of it but what one connection may have unread.

        What comes before it may be unread too: that is waited for as well.
        """
        if self._outlet.paused:
            await self._outlet.drain()
        if len(body) > PIECE_BYTES:
            await self._respond_in_pieces(status, headers, body)
            return
        head = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        fields = f"{head}content-length: {len(body)}\r\n".encode("latin-1", "replace")
        self._outlet.respond(status, fields, body)

    async def _respond_in_pieces(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self.begin(status, {**headers, "content-length": str(len(body))}, body[:PIECE_BYTES], more=True)
        for start in range(PIECE_BYTES, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            await self.send(body[start:end], more=end < len(body))
        await self._outlet.drain()

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
