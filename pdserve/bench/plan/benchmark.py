"""``pdserve bench plan`` predicts what becomes of requests, sends them, and shows both side by side.

The prediction knows the profile, the times and the lengths of the requests, and the machine's pace just before and just
after they are answered; of the answers it knows nothing. What the profile alone predicts is in the report, too. Both
systems are up from the beginning, and get the same requests one after the other, as ``pdserve up`` would place them on
this machine.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from pdserve.bench.cluster import running_cluster
from pdserve.bench.load import Arrival, Job, Target, first_model, run_arrivals, run_jobs, uniform_jobs
from pdserve.bench.machine import this_machine
from pdserve.bench.plan.battery import Battery, quiet_seed
from pdserve.bench.plan.figures import WITHIN, Outcome, Run, by_the_profile_alone, row_of, verdict
from pdserve.bench.plan.profiling import asking, longest_request, measure
from pdserve.bench.report import Report
from pdserve.bench.streamed_answer import Stream, summarise
from pdserve.bench_config import BenchPlanConfig, PlanProfileConfig, ProfilingConfig
from pdserve.core_ledger import private_ledger
from pdserve.errors import BenchError, PlanError
from pdserve.plan.cluster import ClusterShape, live
from pdserve.plan.load import PlannedRequest, poisson_load, read_lengths
from pdserve.plan.profile import PaceProbe, Profile, read_profile, write_profile
from pdserve.settings import to_environ

_MIXED = "mixed"
SYSTEMS = {_MIXED: ClusterShape(mixed=1), "1P1D": ClusterShape(prefill=1, decode=1, nodes_per_machine=2)}
_SATURATING = 200
"""So many requests that come at once show what a node can answer at most."""
_WARM_UP = 8


def run(config: BenchPlanConfig, folder: Path, environ: Mapping[str, str]) -> Report:
    """Measures, predicts and runs. Raises BenchError, PlanError and ChildDied."""
    profile = _profile(config, folder, environ)
    return report_of(config, profile, asyncio.run(_runs(config, profile, folder, environ)))


def report_of(config: BenchPlanConfig, profile: Profile, outcomes: Sequence[Outcome]) -> Report:
    """Returns what was predicted and measured, side by side."""
    rows = tuple(map(row_of, outcomes))
    notes = (
        f"{config.plan.repeats} rounds, in which requests come at random times for {config.plan.seconds:g} s, "
        f"prompts of {config.plan.prompts} and answers of {config.plan.outputs} tokens; predictions know their times "
        f"and lengths, the profile of {profile.measured} UTC, and how many times as long as in the profile the machine "
        "took just before and just after",
        *(verdict(rows, name) for name in WITHIN),
        by_the_profile_alone(rows),
    )
    return Report("plan", this_machine(), to_environ(config), notes, rows)


def _profile(config: BenchPlanConfig, folder: Path, environ: Mapping[str, str]) -> Profile:
    if config.plan.profile:
        return read_profile(Path(config.plan.profile))
    profile = measure(_profiling(config), folder, environ)
    if config.plan.keep_profile:
        write_profile(profile, Path(config.plan.keep_profile))
    return profile


def _profiling(config: BenchPlanConfig) -> PlanProfileConfig:
    repeats = min(config.plan.repeats, ProfilingConfig().repeats)
    settings = ProfilingConfig(
        repeats=repeats,
        vocab_size=config.plan.vocab_size,
        startup_timeout_s=config.plan.startup_timeout_s,
        limit_s=config.plan.run_timeout_s,
    )
    return PlanProfileConfig(settings, config.model, config.cache, config.scheduler, config.cpu)


async def _runs(config: BenchPlanConfig, profile: Profile, folder: Path, environ: Mapping[str, str]) -> list[Outcome]:
    plan, own = config.plan, {**environ, **to_environ(config)}
    profiling = _profiling(config)
    longest = longest_request(profiling, folder, profile.cache)
    cores = sorted(config.cpu.cores or os.sched_getaffinity(0))
    if profile.probe is None:
        raise PlanError("the profile has no probe, which tells the machine's pace; `pdserve plan profile` measures one")
    for shape in SYSTEMS.values():
        live(profile, shape, requests_of(config, 1.0, 0, count=2))
    most = _most_per_s(config, profile)
    runs: dict[tuple[int, str], list[Run]] = {(percent, name): [] for percent in plan.rate_percents for name in SYSTEMS}
    async with AsyncExitStack() as stack:
        targets = {}
        for name, shape in SYSTEMS.items():
            ledger = stack.enter_context(private_ledger())
            settings = {**own, "PDSERVE_CORE_LEDGER": str(ledger)}
            cluster = await stack.enter_async_context(
                running_cluster(name, shape.roles(), cores, settings, plan.startup_timeout_s)
            )
            targets[name] = Target(cluster.url, await first_model(cluster.url))
            _say(f"warming up {name}")
            warm_up = uniform_jobs(_WARM_UP, 256, 32, plan.vocab_size, f"{quiet_seed()}")
            _whole(name, await run_jobs(targets[name], warm_up, _WARM_UP))
        urls = [targets[_MIXED].url]
        (battery,) = await stack.enter_async_context(asking(profiling.profile, profile.cache, longest, urls))
        before = await _pace(config, profile.probe, battery)
        for number in range(plan.repeats):
            for (percent, name), of_point in runs.items():
                load = requests_of(config, percent / 100 * most, percent, number)
                streams = await _measured(config, targets[name], load)
                after = await _pace(config, profile.probe, battery)
                of_point.append(run_of(profile, SYSTEMS[name], load, math.sqrt(before * after), streams))
                _say(
                    f"round {number + 1}, {percent} %, {name}: {len(load)} requests; the machine took "
                    f"{of_point[-1].pace:.2f} times as long as in the profile"
                )
                before = after
    return [
        Outcome(name, percent, percent / 100 * most, profile.speed(SYSTEMS[name].nodes_per_machine), of_point)
        for (percent, name), of_point in runs.items()
    ]


def run_of(
    profile: Profile, shape: ClusterShape, load: Sequence[PlannedRequest], pace: float, streams: Sequence[Stream]
) -> Run:
    """Returns what was predicted of a load on a machine of that pace, beside what came."""
    return Run(pace, live(profile.times(pace), shape, load), live(profile, shape, load), streams)


async def _pace(config: BenchPlanConfig, probe: PaceProbe, battery: Battery) -> float:
    """Returns how many times as long as in the profile the machine takes now. Raises BenchError."""
    try:
        async with asyncio.timeout(config.plan.run_timeout_s):
            return (await battery.probe()).pace(probe)
    except TimeoutError as exc:
        raise BenchError(f"the machine's pace was not known in {config.plan.run_timeout_s:g} s") from exc


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
            return _whole(target.url, await run_arrivals(target, arrivals))
    except TimeoutError as exc:
        raise BenchError(f"a run took more than {config.plan.run_timeout_s:g} s") from exc


def _whole(name: str, streams: list[Stream]) -> list[Stream]:
    result = summarise(streams)
    if result.failed:
        raise BenchError(f"{name} did not answer {result.failed} requests: {'; '.join(result.errors)}")
    return streams


def _say(text: str) -> None:
    print(f"bench plan: {text}", file=sys.stderr, flush=True)
