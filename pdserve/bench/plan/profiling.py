"""Measures the profile of this machine: real nodes with the settings that they would have, timed by a client.

One mixed node with all cores, behind a proxy; then two that divide the cores and lend them to each other, as
``pdserve up`` places them. The two are timed while the other one sleeps and while it computes.

``Battery`` times the steps of a running node as a client sees them: with the CPU time of HTTP and of its client. A lone
prompt tells what chunks take. Streams that begin together decode in step, so the gaps between their tokens are the
engine's steps. A prompt that comes beside such streams makes one gap longer, by its chunk.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from pdserve.bench.cluster import running_cluster
from pdserve.bench.load import Job, Target, first_model, run_job, uniform_jobs
from pdserve.bench.report import this_machine
from pdserve.bench.streamed_answer import Stream
from pdserve.config import Disaggregation, Switch
from pdserve.config.bench import PlanProfileConfig, ProfilingConfig
from pdserve.errors import BenchError, PlanError
from pdserve.machine.core_ledger import private_ledger
from pdserve.machine.memory import MIB, available_memory
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.model_files import served_model_name
from pdserve.models.checkpoint.weight_form import cache_item_bytes, draft_model_size, model_size
from pdserve.models.layer_groups import Load, group_blocks, group_sizes, prompt_bytes
from pdserve.models.sizes import cpu_cache, cpu_scheduler
from pdserve.plan.memory import bounded_places
from pdserve.plan.profile import (
    MOST_NODES,
    VERSION,
    CacheGeometry,
    FrontCost,
    NodeSpeed,
    Observed,
    PaceProbe,
    Profile,
    TransferCost,
    decode_step,
    fit,
    fixed_part,
    lone_prompt,
    lone_prompt_s,
    mixed_step,
    spread_of,
)
from pdserve.process import partition_cores
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

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

        Streams of a fast engine may end before the last one begins, so they get longer until they do not. They do too
        if the client was too late to time any step: it found all tokens at once.
        """
        while prompt_tokens + steps <= self.longest and self.cache.holds(rows, prompt_tokens + steps):
            streams = await asyncio.gather(*(self.ask(prompt_tokens, steps) for _ in range(rows)))
            gaps, contexts = _common_gaps(streams, prompt_tokens)
            if len(gaps) >= _LEAST_STEPS * rows and any(gaps):
                return decode_step(rows, rows * statistics.fmean(contexts), self._mean(gaps))
            steps *= 2
        raise BenchError(
            f"{rows} streams that began together did not decode together, or the client was too late to time them"
        )

    def _mean(self, gaps: list[float]) -> float:
        """Returns the mean of gaps without outliers, and notes how they differ from it. Not all of them are nothing."""
        # A client that reads late sees tokens at once, and gaps of nothing between them.
        most = _OUTLIER * (statistics.median(gaps) or max(gaps))
        steady = [gap for gap in gaps if gap <= most]
        mean_s = statistics.fmean(steady)
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


_AT_ONCE = 4
"""So many nodes share this machine's memory."""
_MOVED = (64, 256, 512, 1024)
"""Prompts of so many tokens show what a transfer takes."""
_MOVED_ANSWER, _MOVES = 3, 5
"""Their answers have so many tokens. Each is asked so often."""
_MOST_FRONT = 0.9
"""The way of a request to the engine and back is at most so much of it."""
LEAST_TOKENS = 2048
"""A KV cache of so many tokens holds the streams and prompts that a profile needs."""
LEAST_POSITIONS = 512
"""Two chunks of a prompt tell what tokens read that are before them."""


async def measure(config: PlanProfileConfig, folder: Path, environ: Mapping[str, str]) -> Profile:
    """Returns the profile of the model in ``folder`` on this machine. Raises BenchError, PlanError and ChildDied."""
    try:
        return await _measure(config, folder, environ)
    except TimeoutError as exc:
        raise BenchError(f"a round of the profile was not done in {config.profile.limit_s:g} s") from exc


@dataclass(slots=True)
class _Measured:
    """What all rounds have measured."""

    alone: Timings = field(default_factory=Timings)
    """These are of a node that has all cores."""
    asleep: Timings = field(default_factory=Timings)
    """These are of one of two nodes that divide the cores, while the other one sleeps."""
    busy: Timings = field(default_factory=Timings)
    """These are of the same node, while the other one computes."""
    moved: list[_MovedPrompt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _MovedPrompt:
    """An answer of three tokens whose prompt a prefill node has computed."""

    prompt_tokens: int
    ttft_s: float
    span_s: float
    """The time from the first token to the last. Tokens that come late may come together."""


async def _measure(config: PlanProfileConfig, folder: Path, environ: Mapping[str, str]) -> Profile:
    config = sized(config, folder)
    machine, own = this_machine(), {**environ, **to_environ(config)}
    cache = cache_geometry(config, folder)
    check_cache(cache)
    longest = longest_request(config, folder, cache)
    both = config.profile.nodes == MOST_NODES
    measured = _Measured()
    for number in range(config.profile.repeats):
        _say(f"round {number + 1} of {config.profile.repeats}")
        async with asyncio.timeout(config.profile.limit_s):
            await _one_node(config, own, cache, longest, measured)
            if both:
                await _two_nodes(config, own, cache, longest, measured)
                await _transfers(config, own, cache, longest, measured)
    alone, front_s = _alone(measured)
    if both:
        # Where steps are short, chance may let a request take less there than its way to the engine and back took here.
        front_s = min(front_s, _MOST_FRONT * min(_lone_s(measured.asleep), _lone_s(measured.busy)))
    speeds = [alone, _dividing(measured, front_s)] if both else [alone]
    return Profile(
        version=VERSION,
        model=config.model.served_model_name or served_model_name(config.model.path, folder),
        machine=machine.cpu,
        cores=len(_cores(config)),
        measured=machine.measured,
        speeds=tuple(speeds),
        transfer=_transfer_cost(measured.moved, speeds[-1], front_s, cache) if both else None,
        front=FrontCost(request_s=front_s, token_s=0.0),
        cache=cache,
    )


def _alone(measured: _Measured) -> tuple[NodeSpeed, float]:
    """Returns the speed of a node that has all cores, and what a request takes besides its steps."""
    steps, front_s = fit(measured.alone.observed)
    spread, probe = spread_of(measured.alone.ratios), PaceProbe.mean(measured.alone.probes)
    return NodeSpeed(nodes=1, steps=steps, beside=steps, spread=spread, probe=probe), front_s


def _dividing(measured: _Measured, front_s: float) -> NodeSpeed:
    """Returns the speed of each of two nodes that divide the cores."""
    steps, _ = fit(measured.asleep.observed, front_s)
    beside, _ = fit(measured.busy.observed, front_s)
    spread, spread_beside = spread_of(measured.asleep.ratios), spread_of(measured.busy.ratios)
    probe = PaceProbe.mean(measured.asleep.probes)
    return NodeSpeed(nodes=2, steps=steps, beside=beside, spread=spread, spread_beside=spread_beside, probe=probe)


def _lone_s(timings: Timings) -> float:
    """Returns the least time of a request that found nothing else."""
    return min(observed.seconds for observed in timings.observed if observed.fronts)


def _transfer_cost(
    moved: Sequence[_MovedPrompt], speed: NodeSpeed, front_s: float, cache: CacheGeometry
) -> TransferCost:
    """Returns by how much tokens are later than steps explain if a prefill node has computed the prompt."""
    explained, took, sizes, late = [], [], [], []
    for tokens in sorted({prompt.prompt_tokens for prompt in moved}):
        alike = [prompt for prompt in moved if prompt.prompt_tokens == tokens]
        explained.append(lone_prompt_s(speed.steps, tokens, cache.max_num_batched_tokens) + front_s)
        took.append(statistics.median(prompt.ttft_s for prompt in alike))
        sizes.append(cache.moved_bytes(tokens))
        span_s = statistics.median(prompt.span_s for prompt in alike)
        late.append(max(0.0, span_s - sum(speed.steps.step_s(1, tokens + step, 0) for step in (1, 2))))
    byte_s = sum(size * seconds for size, seconds in zip(sizes, late, strict=True)) / sum(size * size for size in sizes)
    return TransferCost(fixed_s=fixed_part(explained, took), byte_s=byte_s)


def sized(config: PlanProfileConfig, folder: Path) -> PlanProfileConfig:
    """Returns ``config`` with a KV cache, step tokens and places that all nodes have which measure or are measured.

    Nodes that chose them by themselves would choose others than the profile says.
    """
    decoder = read_decoder_config(folder)
    draft, other = 0, Path(config.scheduler.used_draft_model)
    if config.scheduler.used_draft_model:
        own = read_decoder_config(other)
        draft = draft_model_size(other, own, config.model, config.cpu.kernels, config.cache.block_size).total
    model = model_size(folder, decoder, config.model, config.cpu.kernels, config.cache.kv_cache_dtype, draft)
    memory = config.cache.node_memory_mib * MIB or available_memory() // _AT_ONCE
    cache = cpu_cache(model, config.cache, config.model.max_model_len, memory, ranks=1)
    cores = len(_cores(config)) // config.profile.nodes
    scheduler = cpu_scheduler(model, config.scheduler, cache.kv_cache_mib * MIB, cores)
    return replace(config, cache=cache, scheduler=scheduler)


def cache_geometry(config: PlanProfileConfig, folder: Path) -> CacheGeometry:
    """Returns the KV cache that a node with these settings has on a CPU."""
    model, size, scheduler = read_decoder_config(folder), config.cache.block_size, config.scheduler
    groups = group_sizes(model, cache_item_bytes(config.model.dtype, config.cache.kv_cache_dtype), size)
    asked = config.model.max_model_len
    load = Load(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, asked or model.max_positions, asked)
    blocks = group_blocks(groups, size, config.cache.kv_cache_mib * MIB, load)
    return CacheGeometry(
        block_size=size,
        num_blocks=blocks[0],
        block_bytes=groups[0].block_bytes,
        max_num_seqs=min(scheduler.max_num_seqs, bounded_places(groups, blocks, size, load)),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        prompt_bytes=prompt_bytes(groups, size),
    )


def check_cache(cache: CacheGeometry) -> None:
    """Raises PlanError if such a node cannot be measured."""
    if not batches_within(cache) or not beside_within(cache):
        raise PlanError(
            f"a node with --max-num-seqs {cache.max_num_seqs}, --max-num-batched-tokens {cache.max_num_batched_tokens} "
            f"and a KV cache of {cache.room} tokens cannot be measured: prompts have to be computed beside streams. "
            f"At least 3, 18 and {LEAST_TOKENS} are right; --kv-cache-mib makes the cache larger"
        )


def longest_request(config: PlanProfileConfig, folder: Path, cache: CacheGeometry) -> int:
    """Returns how many tokens a prompt and its answer may have together, so that the cache holds two such requests.

    Raises PlanError if the model takes too few.
    """
    positions = read_decoder_config(folder).max_positions
    longest = min(positions, config.model.max_model_len or positions)
    if longest < LEAST_POSITIONS:
        raise PlanError(f"a profile needs requests of {LEAST_POSITIONS} tokens; the model takes {longest}")
    return min(longest, cache.room // 2)


def _cores(config: PlanProfileConfig) -> list[int]:
    return sorted(config.cpu.cores or os.sched_getaffinity(0))


@asynccontextmanager
async def asking(
    config: ProfilingConfig, cache: CacheGeometry, longest: int, targets: Sequence[str]
) -> AsyncIterator[list[Battery]]:
    """Yields a battery for each server of ``targets``, which has answered a few requests."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    seed = quiet_seed()
    async with aiohttp.ClientSession(connector=connector) as session:
        found = []
        for url in targets:
            target = Target(url, await first_model(url))
            found.append(Battery(session, target, cache, longest, config.vocab_size, f"{seed}:{url}"))
            await found[-1].warm_up()
        yield found


@contextmanager
def _lending(config: PlanProfileConfig, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields the environment of nodes that lend each other their cores, if they are to."""
    if config.profile.lend_cores is Switch.OFF:
        yield {**environ, "PDSERVE_CORE_LEDGER": ""}
        return
    with private_ledger() as ledger:
        yield {**environ, "PDSERVE_CORE_LEDGER": str(ledger)}


async def _one_node(
    config: PlanProfileConfig, environ: Mapping[str, str], cache: CacheGeometry, longest: int, measured: _Measured
) -> None:
    started = running_cluster("profile", [Role.MIXED], _cores(config), environ, config.profile.startup_timeout_s)
    async with started as cluster, asking(config.profile, cache, longest, [cluster.url]) as (battery,):
        _say("a node with all cores")
        await _finished(battery.into(measured.alone))


async def _finished(battery: Battery) -> None:
    """Measures all of a node whose neighbours sleep, between two probes."""
    battery.timings.probes.append(await battery.probe())
    await battery.lone_prompts()
    await battery.decode_steps()
    await battery.prompts_beside_streams()
    battery.timings.probes.append(await battery.probe())


async def _two_nodes(
    config: PlanProfileConfig, environ: Mapping[str, str], cache: CacheGeometry, longest: int, measured: _Measured
) -> None:
    async with AsyncExitStack() as stack:
        own = stack.enter_context(_lending(config, environ))
        urls = []
        # Tokens pass a proxy, which computes on the same cores. Each node has one, so that it can be asked alone.
        for number, share in enumerate(partition_cores(_cores(config), 2)):
            label = f"profile, node {number}"
            started = running_cluster(label, [Role.MIXED], share, own, config.profile.startup_timeout_s)
            urls.append((await stack.enter_async_context(started)).url)
        one, other = await stack.enter_async_context(asking(config.profile, cache, longest, urls))
        _say("two nodes that divide the cores, one of them asleep")
        await _finished(one.into(measured.asleep))
        _say("two nodes that divide the cores, both at work")
        busy = one.into(measured.busy)
        # A node that decodes has one beside it that prefills, and the other way round.
        async with other.prefilling():
            await busy.decode_steps()
            await busy.prompts_beside_streams()
        async with other.streaming(max(rows for rows, _ in beside_within(cache))):
            await busy.lone_prompts()


async def _transfers(
    config: PlanProfileConfig, environ: Mapping[str, str], cache: CacheGeometry, longest: int, measured: _Measured
) -> None:
    with _lending(config, environ) as lending:
        own = {**lending, "PDSERVE_DISAGGREGATION": Disaggregation.ALWAYS.value}
        roles = [Role.PREFILL, Role.DECODE]
        started = running_cluster("profile", roles, _cores(config), own, config.profile.startup_timeout_s)
        async with started as cluster, asking(config.profile, cache, longest, [cluster.url]) as (battery,):
            _say("transfers")
            for tokens in (tokens for tokens in _MOVED if tokens + _MOVED_ANSWER < longest):
                for _ in range(_MOVES):
                    stream = await battery.ask(tokens, _MOVED_ANSWER)
                    span_s = stream.arrivals[-1] - stream.arrivals[0]
                    measured.moved.append(_MovedPrompt(tokens, stream.ttft_s, span_s))


def _say(text: str) -> None:
    print(f"plan profile: {text}", file=sys.stderr, flush=True)


def check_layout(nodes: int, cores: int) -> None:
    """Raises PlanError if a profile of so many nodes on so many cores would be of no use."""
    if nodes > cores:
        raise PlanError(
            f"{nodes} nodes need a core each, and this process may use {cores}; --nodes 1 measures one node"
        )
