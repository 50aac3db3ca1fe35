"""Times the steps of a running node as a client sees them: with the CPU time of HTTP and of its client.

A lone prompt tells what chunks take. Streams that begin together decode in step, so the gaps between their tokens are
the engine's steps. A prompt that comes beside such streams makes one gap longer, by its chunk.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp

from pdserve.bench.load import Job, Target, run_job, uniform_jobs
from pdserve.bench.streamed_answer import Stream
from pdserve.errors import BenchError
from pdserve.plan.profile import CacheGeometry, Observed, PaceProbe, decode_step, lone_prompt, mixed_step

LONE_PROMPTS = (16, 64, 160, 256, 512, 1024)
LONE_REPEATS = 3
BATCHES = ((1, 32), (8, 32), (1, 256), (2, 256), (4, 256), (8, 256), (16, 128), (32, 32), (1, 768), (4, 512))
"""Numbers of streams, and the tokens of their prompts: most have contexts such as requests have."""
STEPS = 26
_LEAST_STEPS = 8
"""So many steps of a batch tell what one takes."""
BESIDE = ((2, 32), (2, 200), (8, 64), (8, 200))
"""Numbers of streams, and the tokens of the prompt that comes beside them."""
BESIDE_REPEATS = 3
_PROBE_PROMPT, _PROBE_PROMPTS, _PROBE_BATCH = 256, 5, (8, 32)
"""So many prompts and such a batch tell the machine's pace in a few seconds.

The prompts of the batch are so short that two nodes, which compute them beside each other, soon decode all of it.
"""
_OUTLIER = 3.0
"""A gap of more than so many medians is none of the engine's making."""
_PROMPT, _STREAM = 32, 4000
"""The tokens of streams beside which something else is measured. One that ends is followed by another."""
_LEAST_BESIDE = 16
"""A shorter prompt takes hardly longer than a step without it."""
_LEAST_STREAM = 200
"""Shorter streams end before a prompt beside them is computed."""
_BEGIN_S = 60.0
"""Streams get so long to begin."""
_NEEDED = 16
"""The most tokens of a prompt's answer."""


@dataclass(slots=True)
class Timings:
    """What was measured of nodes of one kind."""

    observed: list[Observed] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)
    """The gaps of each batch of streams in step, as multiples of their mean."""
    probes: list[PaceProbe] = field(default_factory=list)


@dataclass(slots=True)
class Battery:
    """The measurements of one node."""

    session: aiohttp.ClientSession
    target: Target
    cache: CacheGeometry
    longest: int
    """The most tokens that a prompt and its answer may have together."""
    vocab_size: int
    seed: str
    timings: Timings = field(default_factory=Timings)
    """All that is measured is added to these."""
    _numbers: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)

    def into(self, timings: Timings) -> Battery:
        """Returns a battery for the same node that adds to other timings."""
        return replace(self, timings=timings)

    @property
    def chunk(self) -> int:
        """The most tokens that one of its steps computes."""
        return self.cache.max_num_batched_tokens

    async def warm_up(self) -> None:
        """Has the node compute what a process computes more slowly the first time."""
        await asyncio.gather(*(self.ask(prompt, 4) for prompt in self._that_fit(LONE_PROMPTS)))

    async def lone_prompts(self) -> None:
        for prompt_tokens in self._that_fit(LONE_PROMPTS):
            times = [(await self.ask(prompt_tokens, 2)).ttft_s for _ in range(LONE_REPEATS)]
            self.timings.observed.append(lone_prompt(prompt_tokens, self.chunk, statistics.median(times)))

    async def decode_steps(self) -> None:
        for rows, prompt_tokens in batches_within(self.cache):
            steps = steps_of(rows, prompt_tokens, self.chunk)
            if prompt_tokens + steps <= self.longest:
                self.timings.observed.append(await self._together(rows, prompt_tokens, steps))

    async def probe(self) -> PaceProbe:
        """Returns what always the same prompt and batch take now. It is added to no timings."""
        prompt_tokens = min(_PROBE_PROMPT, self.longest - _NEEDED)
        times = [(await self.ask(prompt_tokens, 2)).ttft_s for _ in range(_PROBE_PROMPTS)]
        within = batches_within(self.cache)
        batch = _PROBE_BATCH if _PROBE_BATCH in within else within[0]
        step = await self.into(Timings())._together(*batch, steps_of(*batch, self.chunk))
        return PaceProbe(prompt_s=statistics.fmean(times), step_s=step.seconds)

    async def _together(self, rows: int, prompt_tokens: int, steps: int) -> Observed:
        """Returns what a step takes in which so many streams decode, over about so many steps.

        Streams of a fast engine may end before the last one begins, so they get longer until they do not.
        """
        while prompt_tokens + steps <= self.longest and self.cache.holds(rows, prompt_tokens + steps):
            streams = await asyncio.gather(*(self.ask(prompt_tokens, steps) for _ in range(rows)))
            gaps, contexts = _common_gaps(streams, prompt_tokens)
            if len(gaps) >= _LEAST_STEPS * rows:
                return decode_step(rows, rows * statistics.fmean(contexts), self._mean(gaps))
            steps *= 2
        raise BenchError(f"{rows} streams that began together did not decode together")

    def _mean(self, gaps: list[float]) -> float:
        """Returns the mean of gaps without outliers, and notes how they differ from it."""
        # A client that reads late sees tokens at once, and gaps of nothing between them.
        most = _OUTLIER * (statistics.median(gaps) or max(gaps))
        steady = [gap for gap in gaps if gap <= most]
        mean_s = statistics.fmean(steady)
        if not mean_s:
            raise BenchError("all tokens came at once: the client was too late to time any step")
        self.timings.ratios.append([gap / mean_s for gap in steady])
        return mean_s

    async def prompts_beside_streams(self) -> None:
        for rows, prompt_tokens in beside_within(self.cache):
            async with self.streaming(rows) as streams:
                found = [await self._beside(streams, prompt_tokens) for _ in range(BESIDE_REPEATS)]
            longest = [gap for gap in found if gap is not None]
            if not longest:
                raise BenchError(f"{rows} streams had no gap when a prompt came beside them")
            contexts = statistics.fmean(gap.context_tokens for gap in longest)
            seconds = statistics.median(gap.seconds for gap in longest)
            self.timings.observed.append(mixed_step(rows, contexts, prompt_tokens, seconds))

    async def _beside(self, streaming: Sequence[Stream], prompt_tokens: int) -> _LongGap | None:
        """Returns the gap that a prompt makes in streams beside it; None if there is none, or not beside all."""
        streams = list(streaming)
        prompt = await self.ask(prompt_tokens, 2)
        begin, end = prompt.started, prompt.arrivals[0]
        if not all(stream.arrivals and stream.arrivals[0] < begin for stream in streams) or any(
            now is not before for now, before in zip(streaming, streams, strict=True)
        ):
            return None
        # The step that has the prompt begins after the prompt came, and gives its first token.
        around = [
            after - before
            for stream in streams
            for before, after in itertools.pairwise(stream.arrivals)
            if before >= begin - 0.05 and abs(after - end) < 0.05
        ]
        context_tokens = sum(_PROMPT + len(stream.arrivals) for stream in streams)
        return _LongGap(max(around), context_tokens) if around else None

    @asynccontextmanager
    async def streaming(self, rows: int) -> AsyncIterator[Sequence[Stream]]:
        """Yields as many streams that have all begun. Another one takes the place of any that ends in the block."""
        streams = [Stream(0.0) for _ in range(rows)]
        tokens = min(_STREAM, self.longest - _PROMPT, self.cache.room // (2 * rows) - _PROMPT)

        async def ask_on(place: int) -> None:
            while True:
                (job,) = self._jobs(1, _PROMPT, tokens)
                await run_job(self.session, self.target, job, streams[place])
                if streams[place].error:
                    raise BenchError(f"{self.target.url} did not go on: {streams[place].error}")
                streams[place] = Stream(0.0)

        async with _in_background(ask_on(place) for place in range(rows)) as asking:
            try:
                async with asyncio.timeout(_BEGIN_S):
                    while not all(len(stream.arrivals) > 1 for stream in streams):
                        for failed in (task for task in asking if task.done()):
                            failed.result()
                        await asyncio.sleep(0.005)
            except TimeoutError as exc:
                raise BenchError(f"{rows} streams did not begin in {_BEGIN_S:g} s") from exc
            yield streams

    @asynccontextmanager
    async def prefilling(self) -> AsyncIterator[None]:
        """Has the node compute prompts, always two at a time, until the block ends."""

        async def ask_on() -> None:
            while True:
                await self.ask(min(512, self.longest - _NEEDED), 1)

        async with _in_background(ask_on() for _ in range(2)):
            yield

    async def ask(self, prompt_tokens: int, output_tokens: int) -> Stream:
        """Returns the complete answer to a prompt that nobody has asked before. Raises BenchError."""
        (job,) = self._jobs(1, prompt_tokens, output_tokens)
        stream = await run_job(self.session, self.target, job, Stream(0.0))
        if stream.error:
            raise BenchError(f"{self.target.url} did not answer: {stream.error}")
        return stream

    def _that_fit(self, prompts: Sequence[int]) -> list[int]:
        return [tokens for tokens in prompts if tokens + _NEEDED <= self.longest]

    def _jobs(self, count: int, prompt_tokens: int, output_tokens: int) -> list[Job]:
        seed = f"plan:{self.seed}:{self._numbers()}"
        return uniform_jobs(count, prompt_tokens, output_tokens, self.vocab_size, seed)


@dataclass(frozen=True, slots=True)
class _LongGap:
    """A gap between tokens of streams in which a prompt was computed, too."""

    seconds: float
    context_tokens: int


@asynccontextmanager
async def _in_background(asking: Iterable[Coroutine[None, None, None]]) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
    """Asks until the block ends. Raises BenchError if a server did not answer meanwhile."""
    tasks = [asyncio.create_task(ask) for ask in asking]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in ended:
        if isinstance(failure, BenchError):
            raise failure


def steps_of(rows: int, prompt_tokens: int, chunk: int) -> int:
    """Returns how many tokens each of a batch's answers has: the first one goes on while others are computed."""
    return STEPS + rows * prompt_tokens // chunk


def batches_within(cache: CacheGeometry) -> list[tuple[int, int]]:
    """Returns the batches of which a node decodes all streams at once."""
    chunk = cache.max_num_batched_tokens
    return [
        (rows, prompt_tokens)
        for rows, prompt_tokens in BATCHES
        if rows <= min(cache.max_num_seqs, chunk)
        and cache.holds(rows, prompt_tokens + steps_of(rows, prompt_tokens, chunk))
    ]


def beside_within(cache: CacheGeometry) -> list[tuple[int, int]]:
    """Returns the streams with the prompts that a node computes in one step beside them."""
    return [
        (rows, min(most, cache.max_num_batched_tokens - rows))
        for rows, most in BESIDE
        if rows < cache.max_num_seqs
        and cache.max_num_batched_tokens - rows >= _LEAST_BESIDE
        and cache.holds(2 * rows + 1, _PROMPT + max(_LEAST_STREAM, most))
    ]


def _common_gaps(streams: Sequence[Stream], prompt_tokens: int) -> tuple[list[float], list[int]]:
    """Returns the gaps between tokens while all streams decode, and the tokens of the context at each."""
    begin = max(stream.arrivals[0] for stream in streams)
    end = min(stream.arrivals[-1] for stream in streams)
    gaps, contexts = [], []
    for stream in streams:
        for number, (before, after) in enumerate(itertools.pairwise(stream.arrivals), 1):
            if begin <= before and after <= end:
                gaps.append(after - before)
                contexts.append(prompt_tokens + number)
    return gaps, contexts


def quiet_seed() -> str:
    """Returns a seed of prompts that no node has in its prefix cache."""
    return str(random.SystemRandom().random())
