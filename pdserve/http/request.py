"""A client's request and its answer, straight over ASGI: the part of HTTP that a hot route needs, and no more.

A request has a label, the ``x-request-id`` that clients and logs see. It is never a key.

A browser sends the body of any page to any server, this one on loopback included, if the body's type is one that forms
have. For other types it asks the server first (``pdserve.http.routes``). So a page's body has to be of JSON's own
type, and text is taken from nobody. Browsers name the origin of such a page; tools like ``curl -d``, which send JSON as
a form, name none.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from pdserve.errors import PayloadTooLarge, RequestError, RequestTimeout, UnsupportedMediaType
from pdserve.http.errors import error_body, error_form, error_headers
from pdserve.http.outlet import OUTLET, Outlet
from pdserve.patience import PatientTimeout

MOST_DIGITS = 18
"""An integer of more digits is beyond all that any field takes. Python's ``int`` refuses some thousands of them."""


_MOST = int("9" * MOST_DIGITS)
_FIRST = frozenset(b"%c" % character for character in b"-0123456789")

Scope: TypeAlias = Mapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Asgi: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

UPLOAD_TIMEOUT_S = 60.0
LABEL_BYTES = 16
LABELS_AT_ONCE = 64
PIECE_BYTES = 64 * 1024
"""Bytes of an answer that are written at once: as many as may be unread before a connection counts as full."""
REQUEST_ID_HEADER = "x-request-id"
TRACEPARENT = b"traceparent"
"""The header of W3C Trace Context that names the client's span."""
JSON = {"content-type": "application/json"}
_JSON = b"application/json"
_REFUSED_TYPES = ("text/plain", "multipart/form-data")
"""Types that no program sends JSON as, but that a page could."""
_PAGE_HEADERS = (b"origin", b"sec-fetch-site")
"""Browsers send at least one of these with a page's request that has a body. Scripts cannot leave them out."""

_LABEL = re.compile(r"[\x21-\x7e]{1,128}")


def as_whole(number: str) -> float | int:
    """Returns a number that is written with a point or an exponent; as an integer if it is one."""
    value = float(number)
    return int(value) if value.is_integer() else value


def read_whole(value: bytes) -> int | None:
    """Returns the integer that is this JSON value; None for any other value.

    One of more than ``MOST_DIGITS`` digits comes as the least or greatest number of so many.
    """
    if value[:1] not in _FIRST:
        return None
    text = value.decode("latin-1")
    try:
        if any(mark in text for mark in ".eE"):
            number = float(text)
            return int(number) if number.is_integer() else None
        if len(text) > MOST_DIGITS:
            return -_MOST if text[0] == "-" else _MOST
        return int(text)
    except ValueError:  # msgspec has found the end of the number, and a node will find that it is none
        return None


def request_label(given: str | None) -> str:
    """Returns ``given``, if it is fit for a header and a log line, or a new label."""
    return given if given is not None and _LABEL.fullmatch(given) else _new_label()


_next_labels: list[str] = []
"""Random labels that no request has yet: to ask the kernel for each is most of what one costs."""
# A child that was forked would give the labels that its parent gives.
os.register_at_fork(after_in_child=_next_labels.clear)


def _new_label() -> str:
    try:
        return _next_labels.pop()
    except IndexError:
        fresh = secrets.token_hex(LABEL_BYTES * LABELS_AT_ONCE)
        chars = 2 * LABEL_BYTES
        _next_labels.extend([fresh[at : at + chars] for at in range(chars, len(fresh), chars)])
        return fresh[:chars]


class ClientGone(Exception):
    """The client left before its request was complete."""


class BodyBounds:
    """Counts the bytes of one body as they come; a subclass may refuse more with a RequestError."""

    __slots__ = ()

    def arrive(self) -> None:
        """Notes, before the first ``add``, that the body has to be waited for."""

    def add(self, size: int) -> None:
        """Counts ``size`` bytes that have come."""

    def arrived(self) -> None:
        """Notes that all of a body that had to be waited for has come."""


class Reply(Protocol):
    """Where the response to a request goes: to its client, or to a log that clients read (``pdserve.api.replay``)."""

    label: str
    path: str
    answered: bool
    """Whether a response has begun."""

    def write(self, data: bytes) -> bool:
        """Writes the next part of a body at once. Returns False where ``drain`` should come before the next."""

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Sends the complete response."""

    async def begin(self, status: int, headers: Mapping[str, str], data: bytes, *, more: bool) -> None:
        """Sends status, headers and the first part of a body."""

    async def send(self, data: bytes, *, more: bool) -> None:
        """Sends the next part of a body."""

    async def drain(self) -> None:
        """Waits while too much is unread."""


class HttpRequest:
    """One request on a connection of ``pdserve.http.guard``. Every response carries the request's label."""

    __slots__ = (
        "_outlet",
        "_receive",
        "_send",
        "address",
        "answered",
        "fields",
        "label",
        "method",
        "path",
        "query",
        "task",
        "write",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The current task is the one that handles the request."""
        outlet: Outlet = scope["extensions"][OUTLET]
        task = outlet.task or asyncio.current_task()
        assert task is not None
        self.task = task
        self._receive = receive
        self._send = send
        # Of a header that comes twice, the first counts.
        self.fields: dict[bytes, bytes] = outlet.fields or dict(reversed(scope["headers"]))
        """The headers, whose names are in lower case."""
        self._outlet = outlet
        self.write = outlet.write_chunk
        """Writes the next part of a body at once. Returns False where ``drain`` should come before the next."""
        client = scope["client"]
        self.address: str = client[0] if client else ""
        """The client's address; empty where it has none."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        given = self.fields.get(b"x-request-id")
        self.label = _new_label() if given is None else request_label(given.decode("latin-1"))
        self.answered = False
        """Whether a response has begun."""

    def header(self, name: bytes) -> str | None:
        """Returns the value of the header ``name``, which is in lower case."""
        value = self.fields.get(name)
        return None if value is None else value.decode("latin-1")

    def check_body_form(self) -> None:
        """Raises UnsupportedMediaType if the body is not to be read as JSON."""
        headers = self.fields
        if headers.get(b"content-type") != _JSON or b"content-encoding" in headers:
            self._check_encoding()
            self._check_type()

    def _check_encoding(self) -> None:
        encoding = (self.header(b"content-encoding") or "identity").strip()
        if encoding.lower() != "identity":
            raise UnsupportedMediaType(
                f"a request body with 'Content-Encoding: {encoding[:64]}' is not supported: send it as it is",
                code="unsupported_content_encoding",
            )

    def _check_type(self) -> None:
        given = self.header(b"content-type") or ""
        kind = given.partition(";")[0].strip().lower()
        from_page = any(name in self.fields for name in _PAGE_HEADERS)
        if kind != _JSON.decode() and (from_page or kind in _REFUSED_TYPES):
            what = f"of the type {given[:64]!r}" if given else "without a type"
            raise UnsupportedMediaType(
                f"a request body {what} is not taken{' from a web page' if from_page else ''}: "
                "send it with 'Content-Type: application/json'",
                code="unsupported_content_type",
            )

    def cancel_on_disconnect(self) -> None:
        """Has ``task`` cancelled if the client leaves before its response is over."""
        self._outlet.on_disconnect = self.task.cancel

    def take_body(self, max_bytes: int) -> bytes | None:
        """Returns the body if all of it has come, as it mostly has; None where ``body`` has to wait for it.

        Raises PayloadTooLarge.
        """
        whole = self._outlet.take_body()
        if whole is not None and len(whole) > max_bytes:
            raise _too_large(max_bytes)
        return whole

    async def body(self, max_bytes: int, bounds: BodyBounds | None = None) -> bytes:
        """Returns the complete body. ``bounds`` count its bytes, and whether it has to be waited for.

        Raises PayloadTooLarge, RequestTimeout, ClientGone, and what ``bounds`` raise.
        """
        bounds = bounds or BodyBounds()
        whole = self.take_body(max_bytes)
        if whole is not None:
            bounds.add(len(whole))
            return whole
        length = self.fields.get(b"content-length")
        # Zeros before a number are legal, and so many that int() would refuse them.
        if length is not None and (len(digits := length.lstrip(b"0")) > 18 or int(digits or b"0") > max_bytes):
            raise _too_large(max_bytes)
        bounds.arrive()
        try:
            async with PatientTimeout(UPLOAD_TIMEOUT_S):
                body = await self._receive_body(max_bytes, bounds)
        except TimeoutError as exc:
            raise RequestTimeout(
                f"the request body did not come within {UPLOAD_TIMEOUT_S:g} s", code="upload_timeout"
            ) from exc
        bounds.arrived()
        return body

    async def _receive_body(self, max_bytes: int, bounds: BodyBounds) -> bytes:
        # Not a list of pieces: each has a header, which is most of it where a client sends a few bytes at a time.
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            piece = message.get("body", b"")
            if len(body) + len(piece) > max_bytes:
                raise _too_large(max_bytes)
            bounds.add(len(piece))
            body += piece
            if not message.get("more_body", False):
                return bytes(body)

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Sends the complete response. Returns when what is unread of it fits into what one connection may have unread.

        A response before it on this connection may be unread too: that is waited for as well.
        """
        outlet = self._outlet
        if outlet.paused:
            await outlet.drain()
        if len(body) > PIECE_BYTES:
            await self._respond_in_pieces(status, headers, body)
            return
        self.answered = True
        fields = f"x-request-id: {self.label}\r\ncontent-length: {len(body)}\r\n{_lines(headers)}"
        outlet.respond(status, fields.encode("latin-1", "replace"), body)

    async def refuse(self, error: RequestError, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Sends ``error`` as the response, in the form of its route; ``headers`` are added to the error's own."""
        body = error_body(error, error_form(self.path), self.label)
        await self.respond(error.status, {**JSON, **error_headers(error), **headers}, body)

    async def begin(self, status: int, headers: Mapping[str, str], data: bytes, *, more: bool) -> None:
        """Sends status, headers and the first part of a body."""
        self.answered = True
        outlet = self._outlet
        if outlet.paused:
            await outlet.drain()
        if "content-length" not in headers:
            lines = f"{_lines(headers)}x-request-id: {self.label}\r\n"
            if outlet.begin_chunks(status, lines.encode("latin-1", "replace"), data, more=more):
                return
        fields = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        fields.append((b"x-request-id", self.label.encode("latin-1")))
        with outlet:
            await self._send({"type": "http.response.start", "status": status, "headers": fields})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send(self, data: bytes, *, more: bool) -> None:
        """Sends the next part of a body. Waits while the client has left too much of it unread."""
        outlet = self._outlet
        if outlet.paused:
            await outlet.drain()
        if not outlet.send_chunk(data, more=more):
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def drain(self) -> None:
        """Waits while the client has left too much unread."""
        await self._outlet.drain()

    async def _respond_in_pieces(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self.begin(status, {**headers, "content-length": str(len(body))}, body[:PIECE_BYTES], more=True)
        for start in range(PIECE_BYTES, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            await self.send(body[start:end], more=end < len(body))
        await self._outlet.drain()


def _lines(headers: Mapping[str, str]) -> str:
    """Returns the lines of a head."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is above {max_bytes} bytes")
