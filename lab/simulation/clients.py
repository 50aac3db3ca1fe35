"""Clients of the simulated cluster: each sends one request over a connection of its own and reads its answer."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httptools

from lab.simulation.plan import Manner, PlannedRequest
from lab.simulation.reference import Answer, ranks_of, text_of, tokens_of
from pdserve.api.routes.completions import owned_salt

MODEL = "simulated"
ROUTE = "/v1/completions"
STOP_CHARACTERS = 2
READ_PAUSE_S = 0.05
"""A slow reader reads nothing for so long after each piece."""
SEND_PAUSE_S = 0.2
FETCH_S = 10.0
COME_BACK = (429, 503)
"""The statuses after which a client may ask again."""


class Outcome(enum.Enum):
    """How a request ended for its client."""

    COMPLETE = "complete"
    """The answer came to its end."""
    ERROR = "error"
    """A status or an event said that it failed."""
    CUT = "cut"
    """The connection ended before the answer did."""
    LEFT = "left"
    """The client has left."""


@dataclass
class Choice:
    """What has come of one answer."""

    text: str = ""
    finish_reason: str = ""
    ranks: list[int] | None = None
    """Those of the prompt's tokens after the first one, if they were asked for."""


@dataclass
class ClientRequest:
    """One request and what has become of it."""

    number: int
    planned: PlannedRequest
    again: bool = False
    """Whether the client has asked for the same before."""
    headers: tuple[str, ...] = ()
    """What the client says beyond what its plan says."""
    last_event: str = ""
    """The id of the last event that came."""
    tries: int = 0
    status: int = 0
    retry_after_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    error: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0
    paused_s: float = 0.0
    """The client itself has read nothing for so long."""
    on_text: Callable[[ClientRequest], None] = lambda _: None
    on_sent: Callable[[str], None] = lambda _: None
    """Called with the label of each try whose last byte is sent."""
    headers_of_answer: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.number}{' again' if self.again else ''}"

    @property
    def label(self) -> str:
        """The ``x-request-id`` of the present try."""
        return f"r{self.number}{'-again' if self.again else ''}{f'-{self.tries}' if self.tries > 1 else ''}"

    @property
    def _salt(self) -> str:
        """The salt of the request's cached blocks. No client has an API key, so nobody owns them."""
        return owned_salt(b"", self.planned.salt)

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The tokens that the model generates for each answer."""
        planned, seed = self.planned, self.planned.seed
        return [
            tokens_of(planned.prompt, planned.max_tokens, self._salt, None if seed is None else seed + index)
            for index in range(planned.choices)
        ]

    @cached_property
    def stop(self) -> str | None:
        at = self.planned.stop_at
        if at is None:
            return None
        return text_of(self.tokens[0])[at : at + STOP_CHARACTERS] or None

    @cached_property
    def reference(self) -> list[Answer]:
        """The answers that the client has to get."""
        return [Answer.of(tokens, self.stop) for tokens in self.tokens]

    @property
    def body(self) -> bytes:
        planned = self.planned
        fields: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(planned.prompt),
            "max_tokens": planned.max_tokens,
            "stream": planned.stream,
        }
        fields |= {"temperature": 0} if planned.seed is None else {"temperature": 1, "top_k": 2, "seed": planned.seed}
        fields |= {"cache_salt": planned.salt} if planned.salt else {}
        fields |= {"n": planned.choices} if planned.choices > 1 else {}
        fields |= {"stop": self.stop} if self.stop else {}
        fields |= {"priority": planned.priority} if planned.priority else {}
        fields |= {"prompt_logprobs": 1} if planned.scored else {}
        return json.dumps(fields).encode()

    @property
    def told(self) -> str:
        """How the request ended, for a person."""
        ending = self.outcomes[-1].value if self.outcomes else "nothing"
        texts = [f"{len(self.choices.get(i, Choice()).text)}/{len(one.text)}" for i, one in enumerate(self.reference)]
        return f"{ending} {self.status} {' '.join(texts)} {self.error}"

    def violation(self) -> str | None:
        """Returns what is wrong about the answers so far."""
        wrong_head = self._wrong_head()
        if wrong_head is not None:
            return f"request {self.name}: {wrong_head}"
        if len(self.outcomes) > 1:
            return f"request {self.name} ended {len(self.outcomes)} times: {self.outcomes}"
        whole = self.outcomes == [Outcome.COMPLETE]
        if not set(self.choices) <= set(range(len(self.reference))):
            return f"request {self.name} got the answers {list(self.choices)}, and asked for {len(self.reference)}"
        for index, reference in enumerate(self.reference):
            wrong = self._wrong(self.choices.get(index, Choice()), reference, whole=whole)
            if wrong is not None:
                return f"request {self.name}, answer {index}: {wrong}"
        return None

    def _wrong_head(self) -> str | None:
        """Returns what is wrong about the head of the last answer."""
        headers, planned = self.headers_of_answer, self.planned
        if self.status == 200 and planned.stream and headers.get("x-accel-buffering") != "no":
            return "a web server between may keep the events of its answer back"
        if self.status == 504 and headers.get("x-should-retry") != "false":
            return "its client is not told that it should not wait for so long again"
        if planned.manner is Manner.SPEAKS_1_0 and "transfer-encoding" in headers:
            return "it speaks HTTP/1.0, and its answer comes in chunks"
        return None

    def _wrong(self, choice: Choice, reference: Answer, *, whole: bool) -> str | None:
        if not reference.text.startswith(choice.text):
            return f"{choice.text!r} came, and not a prefix of {reference.text!r}"
        if whole and choice.text != reference.text:
            return f"it is finished as {choice.text!r}, and not {reference.text!r}"
        if whole and choice.finish_reason != reference.finish_reason:
            return f"it finished because of {choice.finish_reason!r}, and not {reference.finish_reason!r}"
        if whole and self.planned.scored and choice.ranks != ranks_of(self.planned.prompt, self._salt):
            return f"the prompt's tokens have the ranks {choice.ranks}"
        return None


class _Reader(asyncio.Protocol):
    """Reads one response."""

    def __init__(self, request: ClientRequest) -> None:
        self.request = request
        self.outcomes: list[Outcome] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._events = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.request.planned.manner is Manner.READS_SLOWLY:
            self._transport.pause_reading()
            self.request.paused_s += READ_PAUSE_S
            asyncio.get_running_loop().call_later(READ_PAUSE_S, self._transport.resume_reading)
        self._parser.feed_data(data)

    def eof_received(self) -> bool:
        return False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.request.headers_of_answer[name.decode().lower()] = value.decode()
        if name == b"retry-after":
            self.request.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self.request.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.request.planned.stream and self.request.status == 200:
            *events, self._events = (self._events + body).split(b"\n\n")
            for event in events:
                self._take(event)
        else:
            self._body += body

    def _take(self, event: bytes) -> None:
        request = self.request
        for line in event.split(b"\n"):
            if line.startswith(b"id: "):
                request.last_event = line.removeprefix(b"id: ").decode()
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                if not request.error:
                    self.outcomes.append(Outcome.COMPLETE)
                continue
            self._take_object(json.loads(data))

    def _take_object(self, body: dict[str, Any]) -> None:
        request = self.request
        if "error" in body:
            request.error = str(body["error"])
            self.outcomes.append(Outcome.ERROR)
        for said in body.get("choices", ()):
            choice = request.choices.setdefault(said["index"], Choice())
            choice.text += said["text"]
            choice.finish_reason = said["finish_reason"] or choice.finish_reason
            if said.get("prompt_logprobs") is not None:
                choice.ranks = _ranks(request.planned.prompt, said["prompt_logprobs"])
            request.on_text(request)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() == 100:
            return
        if self.request.status != 200:
            self.request.error = self._body.decode()
            self.outcomes.append(Outcome.ERROR)
        elif not self.request.planned.stream:
            self._take_object(json.loads(self._body))
            if not self.request.error:
                self.outcomes.append(Outcome.COMPLETE)
        self._done()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()

    def _done(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


def _ranks(prompt: tuple[int, ...], entries: list[dict[str, Any] | None]) -> list[int]:
    """Returns the rank of each token of the prompt after the first, which has no entry."""
    return [
        0 if entry is None else entry[str(token)]["rank"] for token, entry in zip(prompt[1:], entries[1:], strict=True)
    ]


async def ask(request: ClientRequest, host: str, port: int) -> None:
    """Sends the request and reads its answer, until its end or until the client leaves."""
    loop = asyncio.get_running_loop()
    request.began_s = loop.time()
    try:
        async with asyncio.timeout(request.planned.leaves_after_s):
            while True:
                request.tries += 1
                outcomes = await try_once(request, host, port)
                if request.status not in COME_BACK or request.tries >= request.planned.tries:
                    break
                await asyncio.sleep(request.retry_after_s)
                request.status, request.error, request.began_s = 0, "", loop.time()
        request.outcomes += outcomes or [Outcome.CUT]
    except TimeoutError:
        request.outcomes.append(Outcome.LEFT)
    finally:
        request.ended_s = loop.time()


async def try_once(request: ClientRequest, host: str, port: int) -> list[Outcome]:
    """Sends the request once. Returns what the server has said of its end."""
    transport = None
    request.headers_of_answer = {}
    try:
        transport, reader = await asyncio.get_running_loop().create_connection(lambda: _Reader(request), host, port)
        await _send(request, transport, host)
        if request.planned.manner is Manner.LEAVES_IN_UPLOAD:
            return [Outcome.LEFT]
        await reader.over
        return reader.outcomes
    except OSError as exc:
        request.error = str(exc)
        return [Outcome.CUT]
    finally:
        if transport is not None:
            transport.abort()


async def _send(request: ClientRequest, transport: asyncio.Transport, host: str) -> None:
    """Sends what the client's manner lets it send."""
    manner, body = request.planned.manner, request.body
    fields = [
        f"POST {ROUTE} HTTP/1.{int(manner is not Manner.SPEAKS_1_0)}",
        f"host: {host}",
        f"x-request-id: {request.label}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *([f"idempotency-key: {request.planned.key}"] if request.planned.key else []),
        *request.headers,
        *_connection(manner),
    ]
    message = "\r\n".join([*fields, "", ""]).encode() + body
    match manner:
        case Manner.SENDS_HALF | Manner.LEAVES_IN_UPLOAD:
            transport.write(message[: -len(body) // 2])
            if manner is Manner.LEAVES_IN_UPLOAD:
                await asyncio.sleep(SEND_PAUSE_S)
        case Manner.SENDS_SLOWLY:
            for start in range(0, len(message), 100):
                transport.write(message[start : start + 100])
                if start + 100 >= len(message):
                    request.on_sent(request.label)
                await asyncio.sleep(SEND_PAUSE_S)
        case Manner.SAYS_MORE:
            transport.write(message + message.replace(request.label.encode(), b"more", 1))
        case Manner.OFFERS_UPGRADE:
            transport.write(message[: -len(body)])
            await asyncio.sleep(SEND_PAUSE_S)
            transport.write(body)
        case _:
            transport.write(message)
    if manner.sends_all:
        request.on_sent(request.label)
    if manner is Manner.CLOSES_ITS_HALF:
        transport.write_eof()


def _connection(manner: Manner) -> list[str]:
    """Returns what the client says about its connection."""
    match manner:
        case Manner.SAYS_MORE:
            return []
        case Manner.OFFERS_UPGRADE:
            return ["connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABk"]
        case _:
            return ["connection: close"]


class _Fetcher(asyncio.Protocol):
    """Reads the response to a plain request."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.body = b""
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self._done()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()

    def _done(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def fetch(host: str, port: int, line: str, fields: tuple[str, ...] = (), body: bytes = b"") -> tuple[int, bytes]:
    """Returns status and body of the response to a request; the status is 0 if none comes in time."""
    transport, reader = None, None
    try:
        async with asyncio.timeout(FETCH_S):
            transport, reader = await asyncio.get_running_loop().create_connection(_Fetcher, host, port)
            lengths = (f"content-length: {len(body)}", "content-type: application/json") if body else ()
            head = [f"{line} HTTP/1.1", f"host: {host}", "connection: close", *lengths, *fields, "", ""]
            transport.write("\r\n".join(head).encode() + body)
            await reader.over
            return reader.status, reader.body
    except (OSError, TimeoutError):
        return 0, b""
    finally:
        if transport is not None:
            transport.abort()
