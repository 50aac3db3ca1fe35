"""What ``pdserve bench load`` sends, and one load on one server while it runs.

A session is a row of requests of which each waits for the answer to the one before. ``LoadRun`` leads sessions, counts
what came of them, and says how late their requests were sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import aiohttp

from pdserve.bench.load import Job, Target, connected, request_body, run_job, uniform_jobs
from pdserve.bench.streamed_answer import AnswerTargets, Stream, Tally
from pdserve.config.bench import LoadConfig
from pdserve.errors import BenchError

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
