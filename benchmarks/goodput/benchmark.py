"""``benchmarks goodput`` measures one mixed node, and a prefill and a decode node, on the same cores in turns.

All systems are up from the beginning, and only one has requests at a time: the processes of the others sleep, and the
report says how much CPU time they took. In a round every system gets the same requests, which none has had before.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from benchmarks.goodput.figures import GoodputRun, ShapeOutcome, Unloaded, rows, verdicts
from benchmarks.goodput.workload import LoadPoint, Loop, Tightness, jobs_until, poisson_arrivals, shape_jobs
from benchmarks.process_usage import cpu_s, pids_of
from benchmarks.programs import for_servers
from benchmarks.settings import BenchGoodputConfig, GoodputBenchConfig, GoodputSystem
from benchmarks.workload import run_arrivals
from pdserve.bench.cluster import running_cluster
from pdserve.bench.load import Job, Target, first_model, run_jobs
from pdserve.bench.report import Report, chip_name, this_machine
from pdserve.bench.streamed_answer import AnswerTargets, LoadResult, Stream, summarise
from pdserve.config import Disaggregation, Switch
from pdserve.errors import BenchError
from pdserve.machine.core_ledger import private_ledger
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

_ALONE = 4
"""The number of requests by which a system without other load is known."""
_TRIES = 2
"""How often the first system shows how many requests it can answer. All rates follow from the better one."""
_TTFT_TIMES = 4.0
_ITL_TIMES = {Tightness.TIGHT: 2.0, Tightness.LOOSE: 5.0}

_ROLES = {
    GoodputSystem.MIXED: (Role.MIXED,),
    GoodputSystem.ALWAYS: (Role.PREFILL, Role.DECODE),
    GoodputSystem.AUTO: (Role.PREFILL, Role.DECODE),
}
_DISAGGREGATION = {
    GoodputSystem.MIXED: Disaggregation.NEVER,
    GoodputSystem.ALWAYS: Disaggregation.ALWAYS,
    GoodputSystem.AUTO: Disaggregation.AUTO,
}


@dataclass(frozen=True, slots=True)
class MeasuredSystem:
    """A running system."""

    name: str
    target: Target
    pids: Mapping[str, int]
    """Its processes, if the benchmark has started them."""


def run(config: BenchGoodputConfig, environ: Mapping[str, str]) -> Report:
    """Measures all systems and returns the report. Raises BenchError if a system does not start or answer."""
    bench = GoodputBench(config)
    outcomes = asyncio.run(bench.measure(environ))
    found = rows(outcomes)
    settings = config.goodput
    notes = (
        f"{settings.repeats} rounds, in which each load goes to each system in turns; clients begin requests for "
        f"{settings.seconds:g} s of each run; a good answer is within the targets of TTFT and ITL, which it keeps in "
        "the mean (TPOT), or with p99 in the 99th percentile of its gaps",
        f"the systems that had no requests took {100 * bench.idle_share:.1f} % of one core, together",
        *bench.errors,
        *verdicts(found),
    )
    return Report("goodput", this_machine(chip_name()), to_environ(config), notes, tuple(found))


@dataclass(slots=True)
class GoodputBench:
    """One run of the benchmark, and what it notices besides its figures."""

    config: BenchGoodputConfig
    errors: dict[str, None] = field(default_factory=dict)
    """Each different error of a request, once, with the name of its system."""
    idle_cpu_s: float = 0.0
    busy_s: float = 0.0

    @property
    def idle_share(self) -> float:
        return self.idle_cpu_s / self.busy_s if self.busy_s else 0.0

    @property
    def settings(self) -> GoodputBenchConfig:
        return self.config.goodput

    async def measure(self, environ: Mapping[str, str]) -> list[ShapeOutcome]:
        async with AsyncExitStack() as stack:
            systems = await self._start(stack, environ)
            for system in systems:
                await self._warm_up(system)
            return [await self._measure_shape(systems, shape) for shape in self.settings.shapes]

    async def _start(self, stack: AsyncExitStack, environ: Mapping[str, str]) -> list[MeasuredSystem]:
        own = {**environ, **for_servers(to_environ(self.config))}
        cores = sorted(self.config.cpu.cores or os.sched_getaffinity(0))
        systems = []
        for system in map(GoodputSystem, self.settings.systems):
            # Each system has a ledger of its own, as each `pdserve up` has: no system borrows the cores of another that
            # has no requests.
            ledger = stack.enter_context(private_ledger()) if self.settings.lend_cores is Switch.ON else None
            mode = {
                **own,
                "PDSERVE_DISAGGREGATION": _DISAGGREGATION[system].value,
                "PDSERVE_CORE_LEDGER": str(ledger or ""),
            }
            cluster = await stack.enter_async_context(
                running_cluster(system.value, _ROLES[system], cores, mode, self.settings.startup_timeout_s)
            )
            target = Target(cluster.url, await first_model(cluster.url))
            systems.append(MeasuredSystem(system.value, target, pids_of(cluster)))
        for added in self.settings.add:
            name, _, url = added.partition("=")
            url = url.rstrip("/")
            systems.append(MeasuredSystem(name, Target(url, await first_model(url)), {}))
        return systems

    async def _warm_up(self, system: MeasuredSystem) -> None:
        """Has a system answer as many requests of each shape at once as it ever will."""
        for shape in self.settings.shapes:
            clients = max(self.settings.concurrency)
            jobs = shape_jobs(shape, self.config.workload, clients, "warm-up")
            self._all_answered(system, await self._limited(system, run_jobs(system.target, jobs, clients)))

    async def _measure_shape(self, systems: Sequence[MeasuredSystem], shape: str) -> ShapeOutcome:
        settings = self.settings
        unloaded = await self._unloaded(systems[0], shape)
        ttft_s = settings.ttft_ms / 1e3 or _TTFT_TIMES * unloaded.ttft_s
        itls_s = {
            Tightness.TIGHT: settings.tight_itl_ms / 1e3 or _ITL_TIMES[Tightness.TIGHT] * unloaded.itl_s,
            Tightness.LOOSE: settings.loose_itl_ms / 1e3 or _ITL_TIMES[Tightness.LOOSE] * unloaded.itl_s,
        }
        targets = {tightness: AnswerTargets(ttft_s, itl_s) for tightness, itl_s in itls_s.items()}
        points = [
            point
            for told in (tuple(Tightness) if settings.tell is Switch.ON else (None,))
            for point in self._points(shape, unloaded.requests_per_s, told)
        ]
        runs: dict[LoadPoint, dict[str, list[GoodputRun]]] = {
            point: {system.name: [] for system in systems} for point in points
        }
        for number in range(settings.repeats):
            for turn, point in enumerate(points, number):
                for system in in_order(systems, turn):
                    others = [other for other in systems if other is not system]
                    run = await self._run(system, point, number, others, targets)
                    runs[point][system.name].append(run)
        return ShapeOutcome(shape, unloaded, targets, runs)

    def _points(self, shape: str, most_per_s: float, told: Tightness | None) -> Iterable[LoadPoint]:
        for clients in self.settings.concurrency:
            yield LoadPoint(shape, Loop.CLOSED, clients, told=told)
        for percent in self.settings.rate_percents:
            yield LoadPoint(shape, Loop.OPEN, percent, percent / 100 * most_per_s, told)

    async def _unloaded(self, system: MeasuredSystem, shape: str) -> Unloaded:
        workload, clients = self.config.workload, max(self.settings.concurrency)
        jobs = shape_jobs(shape, workload, _ALONE, "alone")
        alone = self._all_answered(system, await self._limited(system, run_jobs(system.target, jobs, 1)))
        rates = []
        for number in range(_TRIES):
            several = jobs_until(shape, workload, self.settings.seconds, f"several:{number}")
            streams = await self._limited(system, run_jobs(system.target, several, clients))
            rates.append(self._all_answered(system, streams).requests_per_s)
        found = Unloaded(alone.ttft_s.mean, alone.itl_s.p50, max(rates))
        shown = ", ".join(f"{rate:.2f}" for rate in rates)
        print(
            f"shape {shape}, {system.name}: without other load TTFT {found.ttft_s * 1e3:.0f} ms, "
            f"ITL {found.itl_s * 1e3:.1f} ms; with {clients} clients {shown} req/s",
            file=sys.stderr,
            flush=True,
        )
        return found

    async def _run(
        self,
        system: MeasuredSystem,
        point: LoadPoint,
        number: int,
        others: Sequence[MeasuredSystem],
        targets: Mapping[Tightness, AnswerTargets],
    ) -> GoodputRun:
        workload, seconds = self.config.workload, self.settings.seconds
        seed = f"{point.loop.value}:{point.amount}:{number}"
        # Two loads that differ in what is told have different prompts, too: none may be in a prefix cache.
        seed += f":{point.told.value}" if point.told else ""
        # Other servers have no such fields.
        told = targets[point.told] if point.told and system.pids else None
        used = _cpu_s(others)
        if point.loop is Loop.CLOSED:
            jobs = (telling(job, told) for job in jobs_until(point.shape, workload, seconds, seed))
            streams = await self._limited(system, run_jobs(system.target, jobs, point.amount))
        else:
            arrivals = [
                replace(arrival, job=telling(arrival.job, told))
                for arrival in poisson_arrivals(point.shape, workload, point.rate, seconds, seed)
            ]
            streams = await self._limited(system, run_arrivals(system.target, arrivals))
        whole_s = max(stream.ended for stream in streams) - min(stream.started for stream in streams)
        self.idle_cpu_s += _cpu_s(others) - used
        self.busy_s += whole_s
        for stream in streams:
            if stream.error:
                self.errors[f"{system.name}: {stream.error}"] = None
        where = ", ".join(f"{name} {value}" for name, value in point.at.items())
        print(f"round {number + 1}, {where}, {system.name}: {len(streams)} requests", file=sys.stderr, flush=True)
        return GoodputRun(streams, whole_s if point.loop is Loop.CLOSED else seconds)

    async def _limited(self, system: MeasuredSystem, work: Awaitable[list[Stream]]) -> list[Stream]:
        limit_s = self.settings.run_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError as exc:
            raise BenchError(f"a run of {system.name} took more than {limit_s:g} s") from exc

    def _all_answered(self, system: MeasuredSystem, streams: Sequence[Stream]) -> LoadResult:
        """Returns the figures of a run that others are measured by, and so may not have failed."""
        result = summarise(streams)
        if result.failed:
            raise BenchError(f"{system.name} failed without much load: {'; '.join(result.errors)}")
        return result


def telling(job: Job, told: AnswerTargets | None) -> Job:
    """Returns a request that names its targets, if any are told."""
    if told is None:
        return job
    named = {"target_ttft_ms": round(told.ttft_s * 1e3, 3), "target_itl_ms": round(told.itl_s * 1e3, 3)}
    return replace(job, sampling={**job.sampling, **named})


def in_order(systems: Sequence[MeasuredSystem], turn: int) -> list[MeasuredSystem]:
    """Returns all systems. With the turn changes which one begins, and which one follows another."""
    begins = turn % len(systems)
    ordered = [*systems[begins:], *systems[:begins]]
    # Two systems have no other order backwards than in turns.
    backwards = len(systems) > 2 and turn // len(systems) % 2 == 1
    return ordered[::-1] if backwards else ordered


def _cpu_s(systems: Iterable[MeasuredSystem]) -> float:
    return sum(sum(cpu_s(system.pids).values()) for system in systems)
