"""A conversation, and the server that a chat or ``pdserve up --ask`` has it with: its model, the stream of an answer,
and how long that took.

The server speaks OpenAI's API, so it need not be pdserve's. Only what it has said is in an ``Answer``.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from pdserve.cli.node_commands import KEY_ADVICE, ErrorBody, error_message
from pdserve.errors import PdserveError
from pdserve.http.request import REQUEST_ID_HEADER
from pdserve.wire.timeline import MomentKind, Phase, PhaseKind, ProcessKind, Timeline, TimelinePart

MAX_FILE_BYTES = 2**20
"""The largest file that a message takes along. A longer one fits into few models' contexts."""

Message = dict[str, str]
"""One message of the conversation, in OpenAI's form."""


class ChatRefused(PdserveError):
    """The user's command or file cannot be used. The message says why, for the user to read at the prompt."""


class Conversation:
    """The messages of user and model, under one system prompt."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Message] = []
        self._files: list[str] = []
        self._last_question = ""
        self._is_answered = False

    @property
    def turns(self) -> int:
        """How many questions have an answer."""
        return len(self._turns) // 2

    def ask(self, text: str) -> list[Message]:
        """Returns the messages to send for the question ``text``, with the files that were read for it."""
        self._last_question = "\n\n".join([*self._files, text]) if text else "\n\n".join(self._files)
        self._files.clear()
        self._is_answered = False
        return self._messages()

    def ask_again(self) -> list[Message]:
        """Returns the messages to send for another answer to the last question. Raises ChatRefused without one."""
        if not self._last_question:
            raise ChatRefused("there is no question yet to answer again")
        if self._is_answered:
            del self._turns[-2:]
            self._is_answered = False
        return self._messages()

    def answered(self, text: str) -> None:
        """Keeps the answer, or what there is of it. Without any text the question counts as not asked."""
        if text:
            question: Message = {"role": "user", "content": self._last_question}
            self._turns += [question, {"role": "assistant", "content": text}]
            self._is_answered = True

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self._turns.clear()
        self._files.clear()
        self._last_question = ""
        self._is_answered = False

    def read(self, name: str) -> int:
        """Puts the file ``name`` into the next message, and returns its size in bytes. Raises ChatRefused."""
        try:
            path = Path(name).expanduser()
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as exc:
            raise ChatRefused(f"cannot read {name}: {exc.strerror}") from exc
        except (RuntimeError, ValueError) as exc:  # there is no such user, or no file has such a name
            raise ChatRefused(f"cannot read {name}: {exc}") from exc
        if len(data) > MAX_FILE_BYTES:
            raise ChatRefused(
                f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB, the most that a message takes along"
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as exc:
            raise ChatRefused(f"{name} is not a text in UTF-8") from exc
        fence = _fence(text)
        self._files.append(f"{path.name}:\n\n{fence}\n{text.rstrip()}\n{fence}")
        return len(data)

    def _messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns, {"role": "user", "content": self._last_question}]


def _fence(text: str) -> str:
    """Returns a Markdown fence that the text does not have itself."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)


MAX_TOKENS = 256
"""The most tokens of an answer to ``--ask``."""
CONNECT_S = 10.0
LIST_S = 10.0
TIMELINE_S = 3.0
_TIMELINE_LOOKS = 5
_TIMELINE_PAUSE_S = 0.05
"""A node says what it did a moment after the last event has reached the client."""
_LONGEST_LINE = 2**20
_MAX_BODY_BYTES = 16 * 2**20
_SHOWN_CHARS = 500
_LANDED = "landed"
_WENT_ON = {MomentKind.RESUMED: "resumed at {} after its node was lost", MomentKind.MOVED: "moved to {}"}


class AskFailed(PdserveError):
    """The server did not answer the question."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server, and what its requests need."""

    url: str
    """The address without ``/v1``."""
    model: str
    tells_nodes: bool
    """Whether it is pdserve's, and may say which nodes a request went to."""
    access: Access


@dataclass(frozen=True, slots=True)
class Access:
    """What every request needs."""

    key: str = field(default="", repr=False)
    """The API key; empty if there is none."""
    tls: ssl.SSLContext | None = None
    """Whom HTTPS is to trust; None for the system's authorities."""
    timeout_s: float = 600.0

    def session(self, total_s: float) -> aiohttp.ClientSession:
        """Returns a session whose requests take ``total_s`` at most."""
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(ssl=self.tls or True),
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            read_bufsize=_LONGEST_LINE,
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an answer are chosen."""

    temperature: float
    max_tokens: int
    """The most tokens of an answer; 0 leaves it to the server."""


@dataclass(slots=True)
class Answer:
    """One answer, as far as it has come. Times are in seconds."""

    text: str = ""
    reasoning: str = ""
    request_id: str = ""
    finish: str = ""
    """Why the answer ended, as the server says it; empty if the answer did not end by itself."""
    began_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer that has just come."""

    text: str
    is_reasoning: bool


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Card]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The name that some servers have for ``reasoning_content``."""


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


async def find_server(url: str, wanted: str, access: Access) -> Server:
    """Returns the server at ``url`` with the model ``wanted``; if that is empty, with the one that it has first.

    Raises AskFailed if nobody answers there or the server has no such model.
    """
    try:
        async with access.session(LIST_S) as session, session.get(f"{url}/v1/models") as response:
            body = await _body(response)
            if response.status != 200:
                raise AskFailed(_refusal(url, response.status, body))
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise AskFailed(_silence(url, exc, LIST_S)) from exc
    try:
        cards = msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as exc:
        raise AskFailed(f"{url}/v1/models gives no list of models, so it is no server with OpenAI's API") from exc
    if not cards:
        raise AskFailed(f"{url} serves no model now")
    found = [card for card in cards if card.id == wanted] if wanted else cards
    if not found:
        listed = ", ".join(card.id for card in cards)
        raise AskFailed(f"{url} has no model {wanted!r}; it has {listed[:_SHOWN_CHARS]}")
    return Server(url, found[0].id, found[0].owned_by == "pdserve", access)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body, or as much of it as is ever needed."""
    body = b""
    while len(body) < _MAX_BODY_BYTES and (data := await response.content.readany()):
        body += data
    return body


async def ask(server: Server, question: str, show: Callable[[str], None]) -> Answer:
    """Asks one question at temperature 0, and hands each piece of the answer's text to ``show``. Raises AskFailed."""

    def take(piece: Piece) -> None:
        if not piece.is_reasoning:
            show(piece.text)

    answer = Answer()
    await stream_answer(server, [{"role": "user", "content": question}], Sampling(0.0, MAX_TOKENS), answer, take)
    if not answer.text:
        raise AskFailed("the answer has no text")
    return answer


async def stream_answer(
    server: Server, messages: Sequence[Message], sampling: Sampling, answer: Answer, show: Callable[[Piece], None]
) -> None:
    """Asks for an answer, fills ``answer`` with what comes, and hands each piece to ``show``.

    Raises AskFailed. When it is cancelled it closes the connection, which ends the request at the server.
    """
    body: dict[str, object] = {
        "model": server.model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
    }
    if sampling.max_tokens:
        body["max_tokens"] = sampling.max_tokens
    url, timeout_s = server.url, server.access.timeout_s
    headers: dict[str, str] = {}
    if server.tells_nodes:
        # So an answer that is stopped before its first byte can be looked up, too.
        answer.request_id = headers[REQUEST_ID_HEADER] = uuid.uuid4().hex
    answer.began_s = time.monotonic()
    try:
        async with (
            server.access.session(timeout_s) as session,
            session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            answer.request_id = response.headers.get(REQUEST_ID_HEADER, "")
            if response.status != 200:
                raise AskFailed(_refusal(url, response.status, await _body(response)))
            await _receive(response, answer, show)
    except (aiohttp.ClientError, TimeoutError) as exc:
        if answer.first_s:
            raise AskFailed(f"the answer broke off: {_silence(url, exc, timeout_s)}") from exc
        raise AskFailed(_silence(url, exc, timeout_s)) from exc


async def _receive(response: aiohttp.ClientResponse, answer: Answer, show: Callable[[Piece], None]) -> None:
    try:
        async for event in _events(response):
            _take(event, answer, show)
        if not answer.finish:
            raise AskFailed("the server gave no reason for its end")
    except (LineTooLong, ValueError) as exc:  # older versions of aiohttp raise the second one
        longest = f"{_LONGEST_LINE // 2**20} MiB"
        raise AskFailed(f"the answer broke off: the server sent a line longer than {longest}") from exc
    except AskFailed as exc:
        raise AskFailed(f"the answer broke off: {exc}") from exc


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of an SSE stream. Raises AskFailed if it ends before ``[DONE]``."""
    async for line in response.content:
        data = line.decode().strip()
        if not data.startswith("data:"):
            continue
        payload = data.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        try:
            yield json.loads(payload)
        except ValueError as exc:
            raise AskFailed(f"not a chunk of an answer: {payload[:200]!r}") from exc
    raise AskFailed("the stream ended without [DONE]")


def _take(event: object, answer: Answer, show: Callable[[Piece], None]) -> None:
    if isinstance(event, dict) and "error" in event:
        raise AskFailed(_message_of(event))
    try:
        chunk = msgspec.convert(event, _Chunk)
    except msgspec.ValidationError as exc:
        raise AskFailed(f"the server sent no chunk of an answer: {exc}") from exc
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.completion_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        answer.finish = choice.finish_reason or answer.finish
        reasoning = choice.delta.reasoning_content or choice.delta.reasoning or ""
        for text, is_reasoning in ((reasoning, True), (choice.delta.content or "", False)):
            if text:
                answer.last_s = time.monotonic()
                answer.first_s = answer.first_s or answer.last_s
                if is_reasoning:
                    answer.reasoning += text
                else:
                    answer.text += text
                show(Piece(text, is_reasoning))


def _message_of(event: object) -> str:
    try:
        return msgspec.convert(event, ErrorBody).error.message[:_SHOWN_CHARS]
    except msgspec.ValidationError:
        return str(event)[:_SHOWN_CHARS]


def _refusal(url: str, status: int, body: bytes) -> str:
    message = error_message(body) or body.decode(errors="replace").strip() or "nothing more"
    advice = f"; {KEY_ADVICE}" if status in (401, 403) else ""
    return f"{url} answers with status {status}: {message[:_SHOWN_CHARS]}{advice}"


def _silence(url: str, error: Exception, within_s: float) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the certificate of {url} is of an unknown authority; --tls-ca names the PEM file of one"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"nobody answers at {url}: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerTimeoutError | asyncio.TimeoutError):
        return f"{url} took longer than {within_s:g} s"
    if isinstance(error, aiohttp.InvalidURL):
        return f"{url} is no URL like http://127.0.0.1:8000"
    return f"{url} closed the connection ({error or type(error).__name__})"


async def read_timeline(server: Server, request_id: str) -> Timeline | None:
    """Returns what the proxy knows of an ended request; None if the server does not say."""
    url = f"{server.url}/requests/{quote(request_id, safe='')}/timeline"
    timeline = None
    try:
        async with server.access.session(TIMELINE_S) as session:
            for look in range(_TIMELINE_LOOKS):
                if look:
                    await asyncio.sleep(_TIMELINE_PAUSE_S)
                async with session.get(url) as response:
                    if response.status != 200:
                        return timeline
                    timeline = msgspec.json.decode(await _body(response), type=Timeline)
                if timeline.finished and any(part.process is ProcessKind.ENGINE for part in timeline.parts):
                    break
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
        pass
    return timeline


def latency_line(answer: Answer, timeline: Timeline | None) -> str:
    """Returns the line. What the server has not said is not in it."""
    return "; ".join(part for part in (_times(answer), _nodes(timeline), *_moves(timeline)) if part)


def _times(answer: Answer) -> str:
    parts = []
    if answer.first_s:
        parts.append(f"TTFT {_time(answer.first_s - answer.began_s)}")
    decode_s, tokens = answer.last_s - answer.first_s, answer.completion_tokens
    if tokens is not None and tokens > 1 and decode_s > 0:
        parts.append(f"{(tokens - 1) / decode_s:.1f} tok/s")
    elif answer.first_s:
        parts.append(f"{_time(answer.last_s - answer.began_s)} in all")
    if answer.prompt_tokens is not None and tokens is not None:
        parts.append(f"{answer.prompt_tokens} prompt + {tokens} answer tokens")
    if answer.finish == "length":
        parts.append("cut off at the most tokens that it may have")
    return ", ".join(parts)


def _nodes(timeline: Timeline | None) -> str:
    if timeline is None:
        return ""
    answered = list(dict.fromkeys(phase.node for phase in _attempts(timeline)))
    if not answered:
        return ""
    last, went_on = answered[-1], any(_moves(timeline))
    # A node that goes on with an answer has computed nothing of its prompt, or has done so again.
    first = answered[0] if went_on else last
    engines = [part for part in timeline.parts if part.process is ProcessKind.ENGINE and part.node == first]
    prefill = [
        phase.node
        for part in engines[:1]
        for phase in part.phases
        if phase.kind is PhaseKind.FETCH and phase.outcome == _LANDED
    ]
    cached = max((part.cached_tokens for part in engines[:1]), default=0)
    notes = f" ({cached} tokens were cached)" if cached else ""
    where = f"prompt at {prefill[0]}{notes}, answer at {last}" if prefill else f"answer at {last}{notes}"
    tried = "" if went_on or len(answered) == 1 else f", after a try at {', '.join(answered[:-1])}"
    return where + tried


def _attempts(timeline: Timeline) -> list[Phase]:
    phases = [phase for part in _proxies(timeline) for phase in part.phases if phase.kind is PhaseKind.ATTEMPT]
    return sorted(phases, key=lambda phase: phase.start_s)


def _proxies(timeline: Timeline) -> list[TimelinePart]:
    return [part for part in timeline.parts if part.process is ProcessKind.PROXY]


def _moves(timeline: Timeline | None) -> Iterator[str]:
    if timeline is None:
        return
    for part in _proxies(timeline):
        for moment in part.moments:
            if words := _WENT_ON.get(moment.kind):
                pause = f", with a pause of {_time(moment.gap_s)}" if moment.gap_s is not None else ""
                yield words.format(moment.node) + pause


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
