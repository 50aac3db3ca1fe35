"""``benchmarks plan`` predicts what becomes of requests, sends them, and shows both side by side.

The prediction knows the profile, the times and the lengths of the requests, and the system's pace just before and just
after they are answered; of the answers it knows nothing. What the profile alone predicts is in the report, too. Both
systems are up from the beginning, and get the same requests one after the other, as ``pdserve up`` would place them on
this machine. A machine that others use becomes faster and slower, so a profile is measured at the beginning and before
each round, and predictions go by the mean of all that there are by then.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from benchmarks.plan.figures import WITHIN, Outcome, Run, by_the_profile_alone, row_of, verdict
from benchmarks.plan.paces import mean_profile, pace_of, probe_of, slower
from benchmarks.programs import for_servers
from benchmarks.settings import BenchPlanConfig
from benchmarks.workload import Arrival, run_arrivals
from pdserve.bench.cluster import running_cluster
from pdserve.bench.load import Job, Target, first_model, run_jobs, uniform_jobs
from pdserve.bench.plan.profiling import Battery, asking, longest_request, measure, quiet_seed, sized
from pdserve.bench.report import Report, this_machine
from pdserve.bench.streamed_answer import Stream, summarise
from pdserve.config.bench import PlanProfileConfig, ProfilingConfig
from pdserve.errors import BenchError
from pdserve.machine.core_ledger import private_ledger
from pdserve.plan.cluster import ClusterShape, live
from pdserve.plan.load import PlannedRequest, poisson_load, read_lengths
from pdserve.plan.profile import PaceProbe, Profile, read_profile, write_profile
from pdserve.settings import to_environ

_MIXED = "mixed"
SYSTEMS = {_MIXED: ClusterShape(mixed=1), "1P1D": ClusterShape(prefill=1, decode=1, nodes_per_machine=2)}
_SATURATING = 200
"""So many requests that come at once show what a node can answer at most."""
_WARM_UP = 8
_Point = tuple[int, str]
"""A rate in percent, and the name of a system."""


def run(config: BenchPlanConfig, folder: Path, environ: Mapping[str, str]) -> Report:
    """Measures, predicts and runs. Raises BenchError, PlanError and ChildDied."""
    return report_of(config, asyncio.run(_outcomes(config, folder, environ)))


def report_of(config: BenchPlanConfig, outcomes: Sequence[Outcome]) -> Report:
    """Returns what was predicted and measured, side by side."""
    rows = tuple(map(row_of, outcomes))
    known = f"the profile in {Path(config.plan.profile).name}"
    if not config.plan.profile:
        known = "the mean of the profiles so far, two in the first round and one more in each round after it"
    notes = (
        f"{config.plan.repeats} rounds, in which requests come at random times for {config.plan.seconds:g} s, "
        f"prompts of {config.plan.prompts} and answers of {config.plan.outputs} tokens; predictions know their times "
        f"and lengths, {known}, and how many times as long as in the profile the system took just before and just "
        "after",
        *(verdict(rows, name) for name in WITHIN),
        by_the_profile_alone(rows),
    )
    return Report("plan", this_machine(), to_environ(config), notes, rows)


async def _outcomes(config: BenchPlanConfig, folder: Path, environ: Mapping[str, str]) -> list[Outcome]:
    plan, profiling = config.plan, sized(_profiling(config), folder)
    config = dataclasses.replace(config, cache=profiling.cache, scheduler=profiling.scheduler)
    runs: dict[_Point, list[Run]] = {(percent, name): [] for percent in plan.rate_percents for name in SYSTEMS}
    profile = await _first_profile(config, folder, environ)
    cache, known = profile.cache, [profile]
    async with AsyncExitStack() as stack:
        targets = {name: await _started(name, config, environ, stack) for name in SYSTEMS}
        urls = [target.url for target in targets.values()]
        longest = longest_request(profiling, folder, cache)
        found = await stack.enter_async_context(asking(profiling.profile, cache, longest, urls))
        batteries = dict(zip(SYSTEMS, found, strict=True))
        for number in range(plan.repeats):
            if not plan.profile:
                known.append(await measure(profiling, folder, environ))
            async for point, run in _round(config, number, mean_profile(known), targets, batteries):
                runs[point].append(run)
    return [Outcome(name, percent, of_point) for (percent, name), of_point in runs.items()]


async def _first_profile(config: BenchPlanConfig, folder: Path, environ: Mapping[str, str]) -> Profile:
    """Returns the first profile. Raises PlanError if nothing can be predicted from it."""
    if config.plan.profile:
        profile = read_profile(Path(config.plan.profile))
    else:
        profile = await measure(_profiling(config), folder, environ)
    if config.plan.keep_profile:
        write_profile(profile, Path(config.plan.keep_profile))
    for shape in SYSTEMS.values():
        probe_of(profile, shape.nodes_per_machine)
        live(profile, shape, requests_of(config, 1.0, 0, count=2))
    return profile


def _profiling(config: BenchPlanConfig) -> PlanProfileConfig:
    settings = ProfilingConfig(
        repeats=1,
        vocab_size=config.plan.vocab_size,
        startup_timeout_s=config.plan.startup_timeout_s,
        limit_s=config.plan.run_timeout_s,
    )
    return PlanProfileConfig(settings, config.model, config.cache, config.scheduler, config.cpu)


async def _started(name: str, config: BenchPlanConfig, environ: Mapping[str, str], stack: AsyncExitStack) -> Target:
    """Starts a system, and has it answer a few requests. ``stack`` ends it."""
    cores = sorted(config.cpu.cores or os.sched_getaffinity(0))
    ledger = stack.enter_context(private_ledger())
    own = {**environ, **for_servers(to_environ(config)), "PDSERVE_CORE_LEDGER": str(ledger)}
    started = running_cluster(name, SYSTEMS[name].roles(), cores, own, config.plan.startup_timeout_s)
    cluster = await stack.enter_async_context(started)
    target = Target(cluster.url, await first_model(cluster.url))
    _say(f"warming up {name}")
    warm_up = uniform_jobs(_WARM_UP, 256, 32, config.plan.vocab_size, quiet_seed())
    _answered(name, await run_jobs(target, warm_up, _WARM_UP))
    return target


async def _round(
    config: BenchPlanConfig,
    number: int,
    profile: Profile,
    targets: Mapping[str, Target],
    batteries: Mapping[str, Battery],
) -> AsyncIterator[tuple[_Point, Run]]:
    """Yields what became of each load on each system. The rates are shares of what the profile says."""
    most = _most_per_s(config, profile)
    for percent in config.plan.rate_percents:
        for name, target in targets.items():
            rate, probe = percent / 100 * most, probe_of(profile, SYSTEMS[name].nodes_per_machine)
            load = requests_of(config, rate, percent, number)
            before = await _pace(config, probe, batteries[name])
            streams = await _measured(config, target, load)
            after = await _pace(config, probe, batteries[name])
            run = run_of(profile, SYSTEMS[name], rate, load, math.sqrt(before * after), streams)
            _say(
                f"round {number + 1}, {percent} %, {name}: {len(load)} requests; the system took "
                f"{run.pace:.2f} times as long as in the profile"
            )
            yield (percent, name), run


def run_of(
    profile: Profile,
    shape: ClusterShape,
    rate: float,
    load: Sequence[PlannedRequest],
    pace: float,
    streams: Sequence[Stream],
) -> Run:
    """Returns what was predicted of a load on a machine of that pace, beside what came."""
    speed = profile.speed(shape.nodes_per_machine)
    return Run(rate, speed, pace, live(slower(profile, pace), shape, load), live(profile, shape, load), streams)


async def _pace(config: BenchPlanConfig, probe: PaceProbe, battery: Battery) -> float:
    """Returns how many times as long as in the profile a system takes now. Raises BenchError."""
    try:
        async with asyncio.timeout(config.plan.run_timeout_s):
            return pace_of(await battery.probe(), probe)
    except TimeoutError as exc:
        raise BenchError(f"the system's pace was not known in {config.plan.run_timeout_s:g} s") from exc


def _most_per_s(config: BenchPlanConfig, profile: Profile) -> float:
    """Returns how many requests a second a mixed node is predicted to answer, if there are always some."""
    at_once = [msgspec.structs.replace(request, at_s=0.0) for request in requests_of(config, 1.0, 0, count=_SATURATING)]
    return len(at_once) / live(profile, SYSTEMS[_MIXED], at_once).ended_at


def requests_of(
    config: BenchPlanConfig, rate: float, percent: int, number: int = 0, count: int = 0
) -> list[PlannedRequest]:
    """Returns the requests of one rate in one round: as many as come in the seconds of a run in the mean."""
    prompts, outputs = read_lengths(config.plan.prompts), read_lengths(config.plan.outputs)
    count = count or max(2, round(rate * config.plan.seconds))
    return poisson_load(rate, count, prompts, outputs, 100_000 * config.plan.seed + 1000 * number + percent)


async def _measured(config: BenchPlanConfig, target: Target, load: Sequence[PlannedRequest]) -> list[Stream]:
    seed, vocab = quiet_seed(), config.plan.vocab_size
    arrivals = []
    for number, request in enumerate(load):
        job: Job = uniform_jobs(1, request.prompt_tokens, request.output_tokens, vocab, f"{seed}:{number}")[0]
        arrivals.append(Arrival(request.at_s - load[0].at_s, job))
    try:
        async with asyncio.timeout(config.plan.run_timeout_s):
            return _answered(target.url, await run_arrivals(target, arrivals))
    except TimeoutError as exc:
        raise BenchError(f"a run took more than {config.plan.run_timeout_s:g} s") from exc


def _answered(name: str, streams: list[Stream]) -> list[Stream]:
    result = summarise(streams)
    if result.failed:
        raise BenchError(f"{name} did not answer {result.failed} requests: {'; '.join(result.errors)}")
    return streams


def _say(text: str) -> None:
    print(f"plan: {text}", file=sys.stderr, flush=True)
