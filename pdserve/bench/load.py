"""The client of every benchmark of a server: it sends requests of OpenAI's API and records the streamed answers.

Random prompts are the same for the same seed on every machine. They are token ids, and answers are greedy and run to
their full length whatever the model says. In a closed loop (``run_jobs``), each of ``concurrency`` clients sends its
next request as soon as its last one is answered.

A session is a row of requests of which each waits for the answer to the one before. ``LoadRun`` leads sessions, counts
what came of them, and says how late their requests were sent.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec

from pdserve.bench.streamed_answer import DONE, SHOWN_ERROR, AnswerTargets, EventReader, Stream, Tally, read_chunk
from pdserve.config.bench import LoadConfig
from pdserve.errors import BenchError

FIRST_ID = 3
"""The first token id of a prompt: the ids below it are control tokens in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt, and the number of tokens of its answer, whatever the model says."""

    prompt: Sequence[int] | str
    output_tokens: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Fields of the request about sampling; without any, the answer is greedy."""
    exact: bool = True
    """Whether the answer has so many tokens whatever the model says. Otherwise it has at most so many."""
    messages: Sequence[Mapping[str, object]] = ()
    """A chat, which is asked for in place of ``prompt``."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.messages else "/v1/completions"


def uniform_jobs(count: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: str) -> list[Job]:
    """Returns jobs of equal lengths."""
    source = random.Random(seed)  # noqa: S311  # the prompts must be repeatable, not secret
    return [Job(random_prompt(source, prompt_tokens, vocab_size), output_tokens) for _ in range(count)]


def random_prompt(source: random.Random, tokens: int, vocab_size: int) -> list[int]:
    return [source.randrange(FIRST_ID, vocab_size) for _ in range(tokens)]


_REQUEST_TIMEOUT_S = 600.0
_MODELS_TIMEOUT_S = 30.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the name that it gives its model."""

    url: str
    model: str
    token_ids: bool = False
    """Whether to ask for the token ids of the answers, which pdserve and vLLM can report."""
    key: str = field(default="", repr=False)
    """The server's API key; empty without one."""
    tls: ssl.SSLContext | None = None
    """Whom to trust; None trusts the system's authorities."""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def ssl(self) -> ssl.SSLContext | bool:
        """aiohttp's argument of this name."""
        return self.tls or True


async def first_model(url: str) -> str:
    """Returns the name of the model that the server at ``url`` lists first. Raises BenchError."""
    return await find_model(Target(url, ""))


async def find_model(target: Target) -> str:
    """Returns the target's model, or the one that the server lists first. Raises BenchError if nothing answers."""
    try:
        timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{target.url}/v1/models", headers=target.headers, ssl=target.ssl) as response,
        ):
            body = await response.read()
    except aiohttp.ClientConnectorError as exc:
        # asyncio puts a text of its own in place of the system's; the errors of name services have no system's one.
        number = exc.os_error.errno or 0
        why = os.strerror(number) if number > 0 else exc.os_error.strerror or str(exc)
        raise BenchError(f"nothing answers at {target.url}: {why}") from exc
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise BenchError(f"{target.url} does not tell its models: {exc!r}") from exc
    if target.model:
        return target.model
    if response.status != 200:
        shown = body[:SHOWN_ERROR].decode(errors="replace")
        raise BenchError(f"{target.url} does not tell its models: status {response.status}: {shown}")
    try:
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (msgspec.MsgspecError, IndexError) as exc:
        raise BenchError(f"{target.url} does not tell its models: {exc!r}") from exc


async def run_jobs(target: Target, jobs: Iterable[Job], concurrency: int) -> list[Stream]:
    """Returns the streams of all ``jobs``, in the order of the jobs. A failure is in its stream's ``error``.

    A client takes its next job only when its last one is answered, so ``jobs`` may end by the clock. Each request has
    a time limit. The run as a whole has none: the caller sets it.
    """
    streams: list[Stream] = []
    queue = iter(jobs)
    async with connected() as (session, clients):
        for _ in range(concurrency):
            clients.create_task(_client(session, target, queue, streams))
    return streams


async def _client(session: aiohttp.ClientSession, target: Target, queue: Iterator[Job], streams: list[Stream]) -> None:
    for job in queue:
        stream = Stream(0.0)
        streams.append(stream)
        await run_job(session, target, job, stream)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[aiohttp.ClientSession, asyncio.TaskGroup]]:
    """Yields a session without a limit on connections, and the group of the tasks that use it."""
    # Each request has a connection of its own: a server may close an idle one just when a client sends on it again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as clients:
        yield session, clients


async def run_job(
    session: aiohttp.ClientSession, target: Target, job: Job, stream: Stream, body: bytes | None = None
) -> Stream:
    """Sends one request and records its answer in ``stream``, also while it comes. Returns ``stream``.

    ``body`` is what ``request_body`` returned for the job, if the caller has asked before it was time to send.
    """
    body = request_body(target, job) if body is None else body
    headers = {"content-type": "application/json", **target.headers}
    stream.started = time.perf_counter()
    try:
        async with session.post(target.url + job.path, data=body, headers=headers, ssl=target.ssl) as response:
            if response.status != 200:
                stream.fail(f"status {response.status}", (await response.text())[:SHOWN_ERROR])
            else:
                await _receive(response, stream, job)
    except TimeoutError:
        stream.fail(f"no complete answer within {_REQUEST_TIMEOUT_S:g} s")
    except aiohttp.ClientConnectorError as exc:
        stream.fail("no connection", repr(exc))
    except aiohttp.ClientError as exc:
        stream.fail("the connection broke", repr(exc))
    except (BenchError, msgspec.MsgspecError) as exc:
        stream.fail("not a stream of this API", repr(exc))
    stream.ended = time.perf_counter()
    return stream


def request_body(target: Target, job: Job) -> bytes:
    """Returns the job's request as JSON."""
    said = {"messages": job.messages} if job.messages else {"prompt": job.prompt}
    body = {
        "model": target.model,
        **said,
        "max_tokens": job.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Servers other than pdserve, vLLM and SGLang may refuse it, so only requests that need it have it.
        **({"ignore_eos": True} if job.exact else {}),
        **({"return_token_ids": True} if target.token_ids else {}),
        **job.sampling,
    }
    return msgspec.json.encode(body)


async def _receive(response: aiohttp.ClientResponse, stream: Stream, job: Job) -> None:
    reader = EventReader()
    done = False
    async for data in response.content.iter_any():
        now = time.perf_counter()
        for payload in reader.feed(data):
            if payload == DONE:
                done = True
            else:
                take_chunk(stream, payload, now)
    if stream.error:
        return
    if not job.exact and not stream.output_tokens:
        # A server that tells no usage: each chunk counts as one token.
        stream.output_tokens = len(stream.arrivals)
    if not done:
        stream.fail("the stream ended without [DONE]")
    elif not stream.arrivals:
        stream.fail("the stream brought no token")
    elif job.exact and stream.output_tokens != job.output_tokens:
        stream.fail(
            "an answer of another length",
            f"{stream.output_tokens} tokens came where {job.output_tokens} were asked for",
        )


def take_chunk(stream: Stream, payload: bytes, now: float) -> None:
    """Adds the content of the event ``payload``, which came at ``now``. Raises MsgspecError if it is not a chunk."""
    chunk = read_chunk(payload)
    if chunk.error:
        stream.fail("an error in the stream", bytes(chunk.error).decode(errors="replace")[:SHOWN_ERROR])
    for choice in chunk.choices:
        if choice.delta is not None:
            # The first chunk of a chat has only the role, which is no token.
            if choice.delta.brings_token:
                stream.arrivals.append(now)
            stream.pieces.append(choice.delta.content or "")
            continue
        # A chunk that has only the reason is no token; one without text may be half a character.
        if choice.text or choice.token_ids or choice.finish_reason is None:
            stream.arrivals.append(now)
        stream.token_ids.extend(choice.token_ids or ())
        stream.pieces.append(choice.text)
    if chunk.usage is not None:
        stream.output_tokens = chunk.usage.completion_tokens


Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    job: Job
    think_s: float = 0.0
    """The turn comes so long after the end of the answer before."""
    at_s: float = 0.0
    """The turn does not come before this time, in seconds from the beginning of the run."""
    continues: bool = False
    """Whether the job's messages are new ones, which follow those of the turns before and the answers to them."""

    def after(self, said: tuple[Message, ...]) -> Job:
        """Returns the request of this turn, where ``said`` are the messages and answers so far."""
        return replace(self.job, messages=(*said, *self.job.messages)) if self.continues else self.job


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of which each waits for the answer to the one before. Most have one turn."""

    turns: Iterable[Turn]
    at_s: float = field(default=0.0)
    """When its first turn comes, in seconds from the beginning; 0 where the load decides it."""


def random_sessions(load: LoadConfig, count: int, seed: str) -> Iterator[Session]:
    """Yields ``count`` requests of random prompts, which are made one by one."""
    for number in range(count):
        (job,) = uniform_jobs(1, load.prompt_tokens, load.output_tokens, load.vocab_size, f"{seed}:{number}")
        yield Session((Turn(job),))


def at_rate(sessions: Iterable[Session], rate: float, burstiness: float, seed: str) -> Iterator[Session]:
    """Yields ``sessions`` with new times: ``rate`` begin in a second, in the mean.

    The times between two are drawn from a gamma distribution of the shape ``burstiness``, as in vLLM's benchmark: 1 is
    a Poisson process, less brings requests in bursts, and more brings them evenly.
    """
    source = random.Random(seed)  # noqa: S311  # the times must be repeatable, not secret
    at_s = 0.0
    for session in sessions:
        yield replace(session, at_s=at_s)
        at_s += source.gammavariate(burstiness, 1 / (rate * burstiness))


_Client = Callable[[aiohttp.ClientSession], Coroutine[None, None, None]]

_AHEAD_S = 0.5
"""A request is read and written so long before it is sent."""


@dataclass(slots=True)
class LoadRun:
    """A load while it runs, and what came of it."""

    target: Target
    targets: AnswerTargets | None = None
    tally: Tally = field(default_factory=Tally)
    running: int = 0
    good: int = 0
    """The answers that met the targets, with the gaps between tokens in the mean."""
    good_at_p99: int = 0
    """The answers that met them with the 99th percentile of the gaps, too."""
    unsent: int = 0
    """The turns that were not sent because an earlier one of their session failed."""
    lateness_s: array[float] = field(default_factory=lambda: array("d"))
    """How long after its time each request was sent, of those that had a time."""
    began: float = 0.0
    cpu_share: float = 0.0
    """The CPU time of this process for each second of the run: at 1 it, and not the server, is the limit."""

    @property
    def ended(self) -> int:
        return self.tally.succeeded + self.tally.failed + self.unsent

    async def closed(self, sessions: Iterable[Session], concurrency: int) -> None:
        """Leads so many sessions at a time, and the next when one has ended."""
        queue = iter(sessions)

        async def client(http: aiohttp.ClientSession) -> None:
            for session in queue:
                await self._lead(http, session, None)

        await self._run([client] * concurrency)

    async def open(self, sessions: Iterable[Session]) -> None:
        """Begins each session at its time, counted from that of the first, whatever the server does."""

        async def begin(http: aiohttp.ClientSession) -> None:
            async with asyncio.TaskGroup() as group:
                origin: float | None = None
                for session in sessions:
                    origin = self.began + _AHEAD_S - session.at_s if origin is None else origin
                    await _until(origin + session.at_s - _AHEAD_S)
                    group.create_task(self._lead(http, session, origin))

        await self._run([begin])

    async def _run(self, clients: Iterable[_Client]) -> None:
        self.began, cpu_s = time.perf_counter(), time.process_time()
        try:
            async with connected() as (http, group):
                for client in clients:
                    group.create_task(client(http))
        except* BenchError as failures:
            raise _first(failures) from failures
        self.cpu_share = (time.process_time() - cpu_s) / max(1e-9, time.perf_counter() - self.began)

    async def _lead(self, http: aiohttp.ClientSession, session: Session, origin: float | None) -> None:
        """Sends the turns of one session, each after the answer to the one before. ``origin`` is the times' zero."""
        planned = None if origin is None else origin + session.at_s
        said: tuple[Message, ...] = ()
        turns = iter(session.turns)
        ended = 0.0
        for number, turn in enumerate(turns):
            job = turn.after(said)
            body = request_body(self.target, job)
            if number:
                planned = max(ended + turn.think_s, 0.0 if origin is None else origin + turn.at_s)
            if planned is not None:
                await _until(planned)
            stream = await self._ask(http, job, body, planned)
            if stream.error:
                self.unsent += sum(1 for _ in turns)
                return
            ended = stream.ended
            if turn.continues:
                said = (*job.messages, {"role": "assistant", "content": stream.text})

    async def _ask(self, http: aiohttp.ClientSession, job: Job, body: bytes, planned: float | None) -> Stream:
        stream = Stream(0.0)
        self.running += 1
        try:
            await run_job(http, self.target, job, stream, body)
        finally:
            self.running -= 1
        self.tally.add(stream)
        if planned is not None:
            self.lateness_s.append(stream.started - planned)
        if self.targets is not None:
            self.good += self.targets.met_in_mean(stream)
            self.good_at_p99 += self.targets.met_at_p99(stream)
        return stream


async def _until(when: float) -> None:
    """Returns at ``when``, on the clock of ``time.perf_counter``."""
    if (left := when - time.perf_counter()) > 0:
        await asyncio.sleep(left)


def _first(failures: BaseExceptionGroup[BenchError]) -> BenchError:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
