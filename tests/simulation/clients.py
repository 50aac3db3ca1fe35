"""Clients of the simulated cluster: each sends one request over a connection of its own and reads its answer."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools

from tests.simulation.engine_program import EOS, answer

MODEL = "simulated"


def text_of(tokens: Sequence[int]) -> str:
    """Returns the text that a client gets for these tokens."""
    return "".join(chr(0x4E00 + token) for token in tokens if token != EOS)


class Outcome(enum.Enum):
    """How a request ended for its client."""

    WHOLE = "whole"
    """The answer came to its end."""
    ERROR = "error"
    """A status or an event said that it failed."""
    CUT = "cut"
    """The connection ended before the answer did."""
    LEFT = "left"
    """The client has left."""


@dataclass
class ClientRequest:
    """One request and what has become of it."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    salt: str = ""
    leaves_after_s: float | None = None
    text: str = ""
    status: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    error: str = ""
    finish_reason: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0
    on_text: Callable[[ClientRequest], None] = lambda _: None

    @property
    def reference(self) -> str:
        return text_of(answer(self.prompt, self.max_tokens, self.salt))

    @property
    def reference_reason(self) -> str:
        return "stop" if answer(self.prompt, self.max_tokens, self.salt)[-1] == EOS else "length"

    def violation(self) -> str | None:
        """Returns what is wrong about the answer so far."""
        if not self.reference.startswith(self.text):
            return f"request {self.number} got {self.text!r}, and not a prefix of {self.reference!r}"
        if len(self.outcomes) > 1:
            return f"request {self.number} ended {len(self.outcomes)} times: {self.outcomes}"
        if self.outcomes == [Outcome.WHOLE] and self.text != self.reference:
            return f"request {self.number} has a finished answer {self.text!r}, and not {self.reference!r}"
        if self.outcomes == [Outcome.WHOLE] and self.finish_reason != self.reference_reason:
            return (
                f"request {self.number} finished because of {self.finish_reason!r}, and not {self.reference_reason!r}"
            )
        return None


class _Reader(asyncio.Protocol):
    """Reads one response."""

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._events = b""
        self._ended = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.request.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.request.stream and self.request.status == 200:
            *events, self._events = (self._events + body).split(b"\n\n")
            for event in events:
                self._take(event)
        else:
            self._body += body

    def _take(self, event: bytes) -> None:
        request = self.request
        for line in event.split(b"\n"):
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                if not request.error:
                    self._end(Outcome.WHOLE)
                continue
            self._take_object(json.loads(data))

    def _take_object(self, body: dict[str, Any]) -> None:
        request = self.request
        if "error" in body:
            request.error = str(body["error"])
            self._end(Outcome.ERROR)
        for choice in body.get("choices", ()):
            request.text += choice["text"]
            request.finish_reason = choice["finish_reason"] or request.finish_reason
            request.on_text(request)

    def on_message_complete(self) -> None:
        if self.request.status != 200:
            self.request.error = self._body.decode()
            self._end(Outcome.ERROR)
        elif not self.request.stream:
            self._take_object(json.loads(self._body))
            if not self.request.error:
                self._end(Outcome.WHOLE)
        self._done()

    def _end(self, outcome: Outcome) -> None:
        self.request.outcomes.append(outcome)

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()

    def _done(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def ask(request: ClientRequest, host: str, port: int) -> None:
    """Sends the request and reads its answer, until its end or until the client leaves."""
    loop = asyncio.get_running_loop()
    request.began_s = loop.time()
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": request.stream,
            **({"cache_salt": request.salt} if request.salt else {}),
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nx-request-id: r{request.number}\r\n"
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    transport = None
    try:
        async with asyncio.timeout(request.leaves_after_s):
            transport, reader = await loop.create_connection(lambda: _Reader(request), host, port)
            transport.write((head + fields).encode() + body)
            await reader.over
        if not request.outcomes:
            request.outcomes.append(Outcome.CUT)
    except TimeoutError:
        if not request.outcomes:
            request.outcomes.append(Outcome.LEFT)
    except OSError as exc:
        request.error = str(exc)
        request.outcomes.append(Outcome.CUT)
    finally:
        request.ended_s = loop.time()
        if transport is not None:
            transport.abort()
