"""Measures the profile of this machine: real nodes with the settings that they would have, timed by a client.

One mixed node with all cores, behind a proxy; then two that divide the cores and lend them to each other, as
``pdserve up`` places them. The two are timed while the other one sleeps and while it computes.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from pdserve.bench.cluster import running_cluster
from pdserve.bench.load import Target, first_model
from pdserve.bench.plan.battery import Battery, Timings, batches_within, beside_within, quiet_seed
from pdserve.bench.report import this_machine
from pdserve.config import Disaggregation, Switch
from pdserve.config.bench import PlanProfileConfig, ProfilingConfig
from pdserve.errors import BenchError, PlanError
from pdserve.machine.core_ledger import private_ledger
from pdserve.machine.memory import MIB, available_memory
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.demo import served_model_name
from pdserve.models.checkpoint.weight_form import ITEM_BYTES, model_size
from pdserve.models.group_sizes import Load, group_blocks, group_sizes, prompt_bytes
from pdserve.models.sizes import cpu_cache, cpu_scheduler
from pdserve.plan.memory import bounded_places
from pdserve.plan.profile import (
    MOST_NODES,
    VERSION,
    CacheGeometry,
    FrontCost,
    NodeSpeed,
    PaceProbe,
    Profile,
    TransferCost,
    fit,
    fixed_part,
    lone_prompt_s,
    spread_of,
)
from pdserve.process import partition_cores
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

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
    model = model_size(folder, decoder, config.model, config.cpu.kernels)
    memory = config.cache.node_memory_mib * MIB or available_memory() // _AT_ONCE
    cache = cpu_cache(model, config.cache, config.model.max_model_len, memory, ranks=1)
    cores = len(_cores(config)) // config.profile.nodes
    scheduler = cpu_scheduler(model, config.scheduler, cache.kv_cache_mib * MIB, cores)
    return replace(config, cache=cache, scheduler=scheduler)


def cache_geometry(config: PlanProfileConfig, folder: Path) -> CacheGeometry:
    """Returns the KV cache that a node with these settings has on a CPU."""
    model, size, scheduler = read_decoder_config(folder), config.cache.block_size, config.scheduler
    groups = group_sizes(model, ITEM_BYTES[config.model.dtype], size)
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
