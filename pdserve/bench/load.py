"""Puts load on a server that speaks OpenAI's API: pdserve, vLLM, SGLang and others.

The requests are random prompts, the same for the same seed on every machine. Prompts are token ids, answers are greedy
and run to their full length whatever the model says. In a closed loop (``run_jobs``), each of ``concurrency`` clients
streams its next request from ``/v1/completions`` as soon as its last one is answered. In an open loop
(``run_arrivals``), requests come at their times, whatever the server does.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec

from pdserve.bench.machine import this_machine
from pdserve.bench.report import Better, Figure, Report, Row, Unit, measured
from pdserve.bench.streamed_answer import DONE, SHOWN_ERROR, EventReader, LoadResult, Stream, read_chunk, summarise
from pdserve.bench_config import BenchLoadConfig, LoadConfig, WorkloadConfig
from pdserve.errors import BenchError
from pdserve.settings import to_environ

_FIRST_ID = 3
"""The first token id of a prompt: the ids below it are control tokens in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt, and the number of tokens of its answer, whatever the model says."""

    prompt: Sequence[int]
    output_tokens: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Fields of the request about sampling; without any, the answer is greedy."""


def uniform_jobs(count: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: str) -> list[Job]:
    """Returns jobs of equal lengths."""
    source = random.Random(seed)  # noqa: S311  # the prompts must be repeatable, not secret
    return [Job(_prompt(source, prompt_tokens, vocab_size), output_tokens) for _ in range(count)]


def mixed_jobs(workload: WorkloadConfig, count: int, seed: str) -> list[Job]:
    """Returns jobs of log-uniform lengths: many short ones and few long ones, as people's are."""
    source = random.Random(seed)  # noqa: S311  # the prompts must be repeatable, not secret
    return [
        Job(
            _prompt(
                source,
                _log_uniform(source, workload.min_prompt_tokens, workload.max_prompt_tokens),
                workload.vocab_size,
            ),
            _log_uniform(source, workload.min_output_tokens, workload.max_output_tokens),
        )
        for _ in range(count)
    ]


def _prompt(source: random.Random, tokens: int, vocab_size: int) -> list[int]:
    return [source.randrange(_FIRST_ID, vocab_size) for _ in range(tokens)]


def _log_uniform(source: random.Random, least: int, most: int) -> int:
    return min(most, round(math.exp(source.uniform(math.log(least), math.log(most)))))


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


def run(config: BenchLoadConfig) -> Report:
    """Runs ``pdserve bench load``. Raises BenchError if a server could answer no request."""
    load = config.load
    try:
        rows, errors = asyncio.run(_run(load))
    except TimeoutError as exc:
        raise BenchError(f"not done after {load.timeout_s:g} s") from exc
    return Report("load", this_machine(), to_environ(config), tuple(f"error: {error}" for error in errors), tuple(rows))


def load_figures(result: LoadResult) -> tuple[Figure, ...]:
    """Returns the figures that every benchmark of a server shows."""
    return measured(
        Figure("TTFT mean", result.ttft_s.mean * 1e3, Unit.MS, Better.LOWER),
        Figure("TTFT p50", result.ttft_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("TTFT p99", result.ttft_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("TPOT mean", result.tpot_s.mean * 1e3, Unit.MS, Better.LOWER),
        Figure("ITL p50", result.itl_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("ITL p99", result.itl_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("output", result.output_tokens_per_s, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure("requests", result.requests_per_s, Unit.REQUESTS_PER_S, Better.HIGHER),
        Figure("failed", result.failed, Unit.COUNT, Better.LOWER),
    )


async def _run(load: LoadConfig) -> tuple[list[Row], list[str]]:
    """Returns the rows of each number of clients, and errors of requests. Raises BenchError and TimeoutError."""
    rows: list[Row] = []
    errors: dict[str, None] = {}
    async with asyncio.timeout(load.timeout_s):
        targets = [
            Target(url.rstrip("/"), load.model or await first_model(url.rstrip("/")))
            for url in (load.url, load.beside)
            if url
        ]
        for concurrency in load.concurrency:
            count = load.requests or 2 * concurrency + 6
            rounds: list[list[tuple[Figure, ...]]] = [[] for _ in targets]
            for number in range(load.rounds):
                for target, own in zip(targets, rounds, strict=True):
                    # Prompts of another round or load would be found in a prefix cache.
                    result = await _load(load, target, concurrency, count, f"load:{load.seed}:{concurrency}:{number}")
                    errors |= dict.fromkeys(result.errors)
                    own.append(load_figures(result))
            figures = [_medians(own) for own in rounds]
            at: dict[str, int | str] = {"concurrency": concurrency, "requests": count}
            rows += [
                Row("load", at if not load.beside else {**at, "server": target.url}, own)
                for target, own in zip(targets, figures, strict=True)
            ]
            if load.beside:
                rows.append(Row("first : beside", {"concurrency": concurrency}, _ratios(*figures)))
    return rows, list(errors)


async def _load(load: LoadConfig, target: Target, concurrency: int, count: int, seed: str) -> LoadResult:
    """Returns the result of one round at one server. Raises BenchError if no request was answered."""
    jobs = uniform_jobs(count + load.warm_up, load.prompt_tokens, load.output_tokens, load.vocab_size, seed)
    await run_jobs(target, jobs[count:], 1)
    result = summarise(await run_jobs(target, jobs[:count], concurrency))
    if not result.succeeded:
        raise BenchError(f"{target.url} answered none of {result.failed} requests: {'; '.join(result.errors)}")
    return result


def _medians(rounds: Sequence[Sequence[Figure]]) -> tuple[Figure, ...]:
    """Returns the median of each figure that the first round has."""
    found = [{figure.name: figure.value for figure in own} for own in rounds]
    return tuple(
        msgspec.structs.replace(
            figure, value=statistics.median(values[figure.name] for values in found if figure.name in values)
        )
        for figure in rounds[0]
    )


def _ratios(first: Sequence[Figure], second: Sequence[Figure]) -> tuple[Figure, ...]:
    others = {figure.name: figure.value for figure in second}
    return tuple(
        Figure(figure.name, figure.value / others[figure.name], Unit.RATIO, figure.better)
        for figure in first
        if figure.unit is not Unit.COUNT and others.get(figure.name)
    )


async def first_model(url: str) -> str:
    """Returns the name of the model that the server at ``url`` lists first. Raises BenchError."""
    try:
        timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/v1/models") as response:
            return msgspec.json.decode(await response.read(), type=_Models).data[0].id
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, IndexError) as exc:
        raise BenchError(f"{url} does not tell its models: {exc!r}") from exc


async def run_jobs(target: Target, jobs: Iterable[Job], concurrency: int) -> list[Stream]:
    """Returns the streams of all ``jobs``, in the order of the jobs. A failure is in its stream's ``error``.

    A client takes its next job only when its last one is answered, so ``jobs`` may end by the clock. Each request has
    a time limit. The whole run has none: the caller sets it.
    """
    streams: list[Stream] = []
    queue = iter(jobs)
    async with _clients() as (session, clients):
        for _ in range(concurrency):
            clients.create_task(_client(session, target, queue, streams))
    return streams


async def _client(session: aiohttp.ClientSession, target: Target, queue: Iterator[Job], streams: list[Stream]) -> None:
    for job in queue:
        stream = Stream(0.0)
        streams.append(stream)
        await run_job(session, target, job, stream)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, with the time when it is sent, in seconds from the beginning."""

    at_s: float
    job: Job


async def run_arrivals(target: Target, arrivals: Sequence[Arrival]) -> list[Stream]:
    """Returns the streams of all ``arrivals``, which are in the order of their times. Limits are as in ``run_jobs``."""
    streams = [Stream(0.0) for _ in arrivals]
    async with _clients() as (session, clients):
        began = time.monotonic()
        for arrival, stream in zip(arrivals, streams, strict=True):
            await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
            clients.create_task(run_job(session, target, arrival.job, stream))
    return streams


@asynccontextmanager
async def _clients() -> AsyncIterator[tuple[aiohttp.ClientSession, asyncio.TaskGroup]]:
    """Yields a session without a limit on connections, and the group of the tasks that use it."""
    # Each request has a connection of its own: a server may close an idle one just when a client sends on it again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as clients:
        yield session, clients


async def run_job(session: aiohttp.ClientSession, target: Target, job: Job, stream: Stream) -> Stream:
    """Sends one request and records its answer in ``stream``, also while it comes. Returns ``stream``."""
    body = {
        "model": target.model,
        "prompt": list(job.prompt),
        "max_tokens": job.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"return_token_ids": True} if target.token_ids else {}),
        **job.sampling,
    }
    stream.started = time.perf_counter()
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            if response.status != 200:
                stream.error = f"status {response.status}: {(await response.text())[:SHOWN_ERROR]}"
            else:
                await _receive(response, stream, job)
    except (aiohttp.ClientError, TimeoutError, BenchError, msgspec.MsgspecError) as exc:
        stream.error = repr(exc)
    stream.ended = time.perf_counter()
    return stream


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
    if not (done or stream.error):
        stream.error = "the stream ended without [DONE]"
    elif not stream.error and not stream.arrivals:
        stream.error = "the stream brought no token"
    elif not stream.error and stream.output_tokens != job.output_tokens:
        stream.error = f"{stream.output_tokens} tokens came where {job.output_tokens} were asked for"


def take_chunk(stream: Stream, payload: bytes, now: float) -> None:
    """Adds the content of the event ``payload``, which came at ``now``. Raises MsgspecError if it is not a chunk."""
    chunk = read_chunk(payload)
    if chunk.error:
        stream.error = bytes(chunk.error).decode(errors="replace")[:SHOWN_ERROR]
    for choice in chunk.choices:
        # A chunk that has only the reason is no token; one without text may be half a character.
        if choice.text or choice.token_ids or choice.finish_reason is None:
            stream.arrivals.append(now)
        stream.token_ids.extend(choice.token_ids or ())
        stream.text += choice.text
    if chunk.usage is not None:
        stream.output_tokens = chunk.usage.completion_tokens
