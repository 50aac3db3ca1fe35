"""``pdserve bench plan`` predicts what becomes of requests, sends them, and shows both side by side.

The prediction knows the profile, the times and the lengths of the requests, and nothing of the runs. Both systems are
up from the beginning, and get the same requests one after the other, as ``pdserve up`` would place them on this
machine.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdserve.bench.cluster import running_cluster
from pdserve.bench.load import Arrival, Job, Target, first_model, run_arrivals, run_jobs, uniform_jobs
from pdserve.bench.machine import this_machine
from pdserve.bench.plan.battery import quiet_seed
from pdserve.bench.plan.profiling import measure
from pdserve.bench.report import Better, Figure, Report, Row, Unit, measured
from pdserve.bench.streamed_answer import LoadResult, Stream, summarise
from pdserve.bench_config import BenchPlanConfig, PlanProfileConfig, ProfilingConfig
from pdserve.core_ledger import private_ledger
from pdserve.errors import BenchError
from pdserve.plan.cluster import ClusterShape, live
from pdserve.plan.load import PlannedRequest, poisson_load, read_lengths
from pdserve.plan.prediction import PlanTargets, Prediction, predict
from pdserve.plan.profile import Profile, read_profile, write_profile
from pdserve.settings import to_environ

SYSTEM, RATE = "system", "rate %"
BESIDE = "predicted and measured"
SYSTEMS = {"mixed": ClusterShape(mixed=1), "1P1D": ClusterShape(prefill=1, decode=1, nodes_per_machine=2)}
WITHIN = {"output": 0.10, "TTFT p90": 0.20, "ITL p90": 0.20}
"""How far a prediction may be from what is measured, as a share of that."""
MET, MISSED = "met: ", "MISSED: "
VERDICTS = (MET, MISSED)
"""How a sentence begins that says whether predictions were near enough."""
_ALWAYS = frozenset({"output"})
"""Beyond 100 %, requests wait the longer the longer they come, so latencies are shown there and not judged."""
_ANY = PlanTargets(0.0, 0.0)
_SATURATING = 200
"""So many requests that come at once show what a node can answer at most."""
_WARM_UP = 8
_WHOLE = 100
"""The rate, in percent, up to which a node answers as many requests as come."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: what was predicted, and what was measured."""

    system: str
    percent: int
    rate: float
    predicted: Prediction
    measured: LoadResult


def run(config: BenchPlanConfig, folder: Path, environ: Mapping[str, str]) -> Report:
    """Measures, predicts and runs. Raises BenchError, PlanError and ChildDied."""
    profile = _profile(config, folder, environ)
    return report_of(config, profile, asyncio.run(_runs(config, profile, environ)))


def report_of(config: BenchPlanConfig, profile: Profile, outcomes: Sequence[Outcome]) -> Report:
    """Returns what was predicted and measured, side by side."""
    rows = tuple(_row(outcome) for outcome in outcomes)
    notes = (
        f"requests come at random times for {config.plan.seconds:g} s, prompts of {config.plan.prompts} and answers of "
        f"{config.plan.outputs} tokens; predictions know their times and lengths, and the profile of "
        f"{profile.measured} UTC",
        *(verdict(rows, name) for name in WITHIN),
    )
    return Report("plan", this_machine(), to_environ(config), notes, rows)


def _profile(config: BenchPlanConfig, folder: Path, environ: Mapping[str, str]) -> Profile:
    if config.plan.profile:
        return read_profile(Path(config.plan.profile))
    settings = ProfilingConfig(
        vocab_size=config.plan.vocab_size,
        startup_timeout_s=config.plan.startup_timeout_s,
        limit_s=config.plan.run_timeout_s,
    )
    profiling = PlanProfileConfig(settings, config.model, config.cache, config.scheduler, config.cpu)
    profile = measure(profiling, folder, environ)
    if config.plan.keep_profile:
        write_profile(profile, Path(config.plan.keep_profile))
    return profile


async def _runs(config: BenchPlanConfig, profile: Profile, environ: Mapping[str, str]) -> list[Outcome]:
    plan, own = config.plan, {**environ, **to_environ(config)}
    cores = sorted(config.cpu.cores or os.sched_getaffinity(0))
    outcomes = []
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
        most = _most_per_s(config, profile)
        for percent in plan.rate_percents:
            rate = percent / 100 * most
            load = requests_of(config, rate, percent)
            for name, shape in SYSTEMS.items():
                predicted = predict(profile, shape, load, _ANY)
                _say(f"{name}, {percent} % ({rate:.2f} req/s): {len(load)} requests")
                outcomes.append(Outcome(name, percent, rate, predicted, await _measured(config, targets[name], load)))
    return outcomes


def _most_per_s(config: BenchPlanConfig, profile: Profile) -> float:
    """Returns how many requests a second a mixed node is predicted to answer, if there are always some."""
    at_once = [msgspec.structs.replace(request, at_s=0.0) for request in requests_of(config, 1.0, 0, count=_SATURATING)]
    return len(at_once) / live(profile, SYSTEMS["mixed"], at_once).ended_at


def requests_of(config: BenchPlanConfig, rate: float, percent: int, count: int = 0) -> list[PlannedRequest]:
    """Returns the requests of one rate: as many as come in the seconds of a run in the mean."""
    prompts, outputs = read_lengths(config.plan.prompts), read_lengths(config.plan.outputs)
    number = count or max(2, round(rate * config.plan.seconds))
    return poisson_load(rate, number, prompts, outputs, 1000 * config.plan.seed + percent)


async def _measured(config: BenchPlanConfig, target: Target, load: Sequence[PlannedRequest]) -> LoadResult:
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


def _whole(name: str, streams: Sequence[Stream]) -> LoadResult:
    result = summarise(streams)
    if result.failed:
        raise BenchError(f"{name} did not answer {result.failed} requests: {'; '.join(result.errors)}")
    return result


def _row(outcome: Outcome) -> Row:
    expected, found = outcome.predicted, outcome.measured
    pairs = [
        ("output", Unit.TOKENS_PER_S, expected.output_tokens_per_s, found.output_tokens_per_s),
        ("TTFT p50", Unit.MS, 1e3 * expected.ttft.p50, 1e3 * found.ttft_s.p50),
        ("TTFT p90", Unit.MS, 1e3 * expected.ttft.p90, 1e3 * found.ttft_s.p90),
        ("TTFT p99", Unit.MS, 1e3 * expected.ttft.p99, 1e3 * found.ttft_s.p99),
        ("ITL p50", Unit.MS, 1e3 * expected.itl.p50, 1e3 * found.itl_s.p50),
        ("ITL p90", Unit.MS, 1e3 * expected.itl.p90, 1e3 * found.itl_s.p90),
        ("ITL p99", Unit.MS, 1e3 * expected.itl.p99, 1e3 * found.itl_s.p99),
    ]
    figures = [Figure("rate", outcome.rate, Unit.REQUESTS_PER_S)]
    for name, unit, ours, theirs in pairs:
        figures.append(Figure(f"{name} predicted", ours, unit))
        figures.append(Figure(f"{name} measured", theirs, unit))
        figures.append(Figure(ratio_name(name), ours / theirs if theirs else math.nan, Unit.RATIO, Better.NEITHER))
    return Row(BESIDE, {SYSTEM: outcome.system, RATE: outcome.percent}, measured(*figures))


def ratio_name(name: str) -> str:
    return f"{name} predicted : measured"


def verdict(rows: Sequence[Row], name: str) -> str:
    """Returns a sentence that says in how many runs a prediction was near enough, and where it was farthest off."""
    bound, always = WITHIN[name], name in _ALWAYS
    ratios = [
        (row.figure(ratio_name(name)).value, f"{row.at[SYSTEM]} at {row.at[RATE]} %")
        for row in rows
        if ratio_name(name) in {figure.name for figure in row.figures} and (always or int(row.at[RATE]) <= _WHOLE)
    ]
    near = sum(abs(ratio - 1) <= bound for ratio, _ in ratios)
    worst, where = max(ratios, key=lambda found: abs(found[0] - 1), default=(math.nan, "no run"))
    met = MET if ratios and near == len(ratios) else MISSED
    return (
        f"{met}{name} predicted : measured, wanted within {bound:.0%}{'' if always else ' up to a rate of 100 %'}, "
        f"holds in {near} of {len(ratios)} runs; "
        f"the farthest is {worst:.2f} ({where})"
    )


def _say(text: str) -> None:
    print(f"bench plan: {text}", file=sys.stderr, flush=True)
