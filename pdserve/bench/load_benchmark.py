"""``pdserve bench load`` measures any server that speaks OpenAI's API, under a load that the user chooses.

The load is a number of clients, a rate, or the times in a dataset. Requests are random prompts or those of a dataset.
A second server may get the same load in turns with the first.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TextIO

import msgspec

from pdserve.bench.dataset import Dataset, open_dataset
from pdserve.bench.load import (
    Job,
    LoadRun,
    Session,
    Target,
    at_rate,
    find_model,
    random_sessions,
    run_jobs,
    uniform_jobs,
)
from pdserve.bench.report import Better, Figure, Report, Row, Unit, measured, this_machine
from pdserve.bench.streamed_answer import AnswerTargets, Distribution, distribution, result_of
from pdserve.config import AdmissionConfig
from pdserve.config.bench import BenchLoadConfig, GoodAnswerConfig
from pdserve.errors import BenchError, ConfigError
from pdserve.http.tls import Trust, read_authorities
from pdserve.process import allow_open_files
from pdserve.settings import to_environ
from pdserve_proxy.credentials import read_api_keys

_RATE_S = 30.0
"""Requests of a rate are sent for so long if the user does not say how many."""
_LATE_S = 0.02
_BUSY = 0.85


@dataclass(frozen=True, slots=True)
class _Point:
    """One load."""

    at: dict[str, int | str]
    count: int
    """The number of sessions."""
    concurrency: int = 0
    """The number of clients of a closed loop; 0 for an open loop."""


@dataclass(slots=True)
class _Measured:
    """What came of one load on one server, over all rounds."""

    runs: list[LoadRun] = field(default_factory=list)

    def failures(self) -> Counter[str]:
        return sum((run.tally.reasons for run in self.runs), Counter())


def run(config: BenchLoadConfig) -> Report:
    """Runs ``pdserve bench load``.

    Raises ConfigError for flags that exclude each other, and BenchError if a server could answer no request.
    """
    allow_open_files()
    load = config.load
    _check_arrivals(config)
    dataset = None
    if config.dataset.file:
        dataset = open_dataset(config.dataset, load.output_tokens, load.vocab_size, load.seed)
    try:
        rows, notes = asyncio.run(_LoadBench(config, dataset).measure())
    except TimeoutError as exc:
        raise BenchError(f"not done after {load.timeout_s:g} s, which --run-timeout-s allows") from exc
    return Report("load", this_machine(), to_environ(config), tuple(notes), tuple(rows))


def _check_arrivals(config: BenchLoadConfig) -> None:
    """Raises ConfigError for flags that would have no effect."""
    rate, usual = config.arrivals.rate, BenchLoadConfig()
    if rate and config.load.concurrency != usual.load.concurrency:
        raise ConfigError("--request-rate and --concurrency exclude each other: a rate holds, however many wait")
    if not rate and config.arrivals.burstiness != usual.arrivals.burstiness:
        raise ConfigError("--burstiness needs --request-rate, whose times it spreads")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class _LoadBench:
    """One run of the benchmark."""

    config: BenchLoadConfig
    dataset: Dataset | None

    async def measure(self) -> tuple[list[Row], list[str]]:
        """Returns all rows, and what a reader has to know. Raises BenchError and TimeoutError."""
        load = self.config.load
        points = self._points()
        self._check(points)
        rows: list[Row] = []
        notes = self._dataset_notes()
        async with asyncio.timeout(load.timeout_s):
            targets = [await self._target(url) for url in (load.url, load.beside) if url]
            for number, point in enumerate(points):
                found = [_Measured() for _ in targets]
                for round_ in range(load.rounds):
                    for target, own in zip(targets, found, strict=True):
                        own.runs.append(await self._run(target, point, number * load.rounds + round_))
                rows += self._rows(point, targets, found)
                notes += _notes(point, targets, found)
        return rows, list(dict.fromkeys(notes))

    def _points(self) -> list[_Point]:
        load, rate = self.config.load, self.config.arrivals.rate
        sessions = len(self.dataset.turns) if self.dataset else 0
        if rate:
            count = load.requests or sessions or max(1, round(rate * _RATE_S))
            return [_Point({"rate": f"{rate:g}/s", "requests": self._requests(0, count)}, count)]
        if self.dataset and self.dataset.timed:
            count = load.requests or sessions
            at: dict[str, int | str] = {"speed": f"{self.config.dataset.speed:g}"}
            return [_Point({**at, "requests": self._requests(0, count)}, count)]
        points = []
        for number, clients in enumerate(load.concurrency):
            count = load.requests or sessions or 2 * clients + 6
            requests = self._requests(number * load.rounds * count, count)
            points.append(_Point({"concurrency": clients, "requests": requests}, count, clients))
        return points

    def _requests(self, first: int, count: int) -> int:
        return self.dataset.requests(first, count) if self.dataset else count

    def _check(self, points: Sequence[_Point]) -> None:
        """Raises BenchError for a plan that cannot be carried out."""
        load, dataset = self.config.load, self.dataset
        if dataset:
            wanted, there = load.rounds * sum(point.count for point in points), len(dataset.turns)
            if wanted > there:
                many = len(points) * load.rounds > 1
                apart = ", since each load has requests of its own that no cache knows" if many else ""
                raise BenchError(f"{dataset.name} has {there} requests or conversations; {wanted} are needed{apart}")
        planned = sum(self._sends_for_s(point) or 0.0 for point in points) * load.rounds * (2 if load.beside else 1)
        if planned > load.timeout_s:
            raise BenchError(
                f"requests are sent for {planned:.0f} s, and --run-timeout-s allows {load.timeout_s:g}: give a longer "
                "one, or less --requests"
            )

    def _sends_for_s(self, point: _Point) -> float | None:
        if point.concurrency:
            return None
        if self.config.arrivals.rate:
            return point.count / self.config.arrivals.rate
        assert self.dataset is not None
        complete = point.count == len(self.dataset.turns)
        return self.dataset.last_at_s if complete else max(each.at_s for each in self.dataset.sessions(0, point.count))

    async def _target(self, url: str) -> Target:
        """Returns a server that answers. Raises BenchError if it does not."""
        load = self.config.load
        keys = read_api_keys(AdmissionConfig(api_keys=load.api_keys, api_key_file=load.api_key_file))
        authorities = self.config.trust.authorities
        target = Target(
            url.rstrip("/").removesuffix("/v1"),
            load.model,
            key=keys[0].key if keys else "",
            tls=Trust(read_authorities(authorities)).context if authorities else None,
        )
        return replace(target, model=await find_model(target))

    async def _warm_up(self, target: Target, seed: str) -> None:
        """Sends the requests that do not count. Raises BenchError if one of them fails."""
        for stream in await run_jobs(target, self._warm_up_jobs(seed), 1):
            if stream.error:
                raise BenchError(f"a request of the warm-up failed at {target.url}: {stream.error}")

    def _warm_up_jobs(self, seed: str) -> list[Job]:
        load = self.config.load
        if self.dataset is None:
            return uniform_jobs(load.warm_up, load.prompt_tokens, load.output_tokens, load.vocab_size, seed)
        # Its own requests would be found in a prefix cache. These go the same way.
        (first,) = self.dataset.sessions(0, 1)
        form = next(iter(first.turns)).job
        said = ({"role": "user", "content": "Hello"},) if form.messages else ()
        prompt = "Hello" if isinstance(form.prompt, str) else form.prompt[::-1]
        return [replace(form, prompt=prompt, messages=said)] * load.warm_up

    async def _run(self, target: Target, point: _Point, number: int) -> LoadRun:
        """Returns one run, the ``number``-th with requests of its own. Raises BenchError if nothing was answered."""
        good = self.config.good
        targets = AnswerTargets(good.ttft_ms / 1e3 or math.inf, good.itl_ms / 1e3 or math.inf)
        load_run = LoadRun(target, targets)
        seed = f"load:{self.config.load.seed}:{point.concurrency}:{number}"
        await self._warm_up(target, f"{seed}:warm-up")
        name = ", ".join(f"{key} {value}" for key, value in point.at.items() if key != "requests")
        requests = point.at["requests"]
        assert isinstance(requests, int)
        if self.config.load.beside:
            name = f"{target.url}, {name}"
        progress = Progress(name, requests, self._sends_for_s(point))
        async with shown(progress, load_run, sys.stderr):
            sessions = self._sessions(point, number, seed)
            await (load_run.closed(sessions, point.concurrency) if point.concurrency else load_run.open(sessions))
        tally = load_run.tally
        if not tally.succeeded:
            raise BenchError(f"{target.url} answered none of {tally.failed} requests: {'; '.join(tally.errors)}")
        return load_run

    def _sessions(self, point: _Point, number: int, seed: str) -> Iterator[Session]:
        load, arrivals = self.config.load, self.config.arrivals
        if self.dataset:
            sessions = self.dataset.sessions(number * point.count, point.count)
        else:
            # Prompts of another round or load would be found in a prefix cache.
            sessions = random_sessions(load, point.count, seed)
        return at_rate(sessions, arrivals.rate, arrivals.burstiness, seed) if arrivals.rate else sessions

    def _dataset_notes(self) -> list[str]:
        if self.dataset is None:
            return []
        left_out = self.dataset.left_out
        more = f"; {left_out} conversations in which no person says anything are left out" if left_out else ""
        requests = _counted(sum(self.dataset.turns), "request")
        return [f"{self.dataset.name}: {requests} in {_counted(len(self.dataset.turns), 'session')}{more}"]

    def _rows(self, point: _Point, targets: Sequence[Target], found: Sequence[_Measured]) -> list[Row]:
        rows: list[Row] = []
        flat = []
        ats = [point.at if len(targets) == 1 else {**point.at, "server": target.url} for target in targets]
        for at, own in zip(ats, found, strict=True):
            figures = _medians([_load_figures(each, self.config.good) for each in own.runs])
            rows.append(Row("load", at, figures))
            flat.append(list(figures))
        for at, own, all_figures in zip(ats, found, flat, strict=True):
            for name in _LATENCIES:
                figures = _medians([_latency_figures(each, name) for each in own.runs])
                if figures:
                    rows.append(Row("latencies", {**at, "of": name}, figures))
                all_figures += [msgspec.structs.replace(each, name=f"{name} {each.name}") for each in figures]
        for at, own in zip(ats, found, strict=True):
            for reason, count in own.failures().most_common():
                why = Figure("failed", count, Unit.COUNT, Better.LOWER)
                rows.append(Row("failed requests", {**at, "reason": reason}, (why,)))
        if len(targets) > 1:
            where = {key: value for key, value in point.at.items() if key != "requests"}
            rows.append(Row("first : beside", where, _ratios(*flat)))
        return rows


_LATENCIES = ("TTFT", "ITL", "TPOT", "E2E")


def _load_figures(run: LoadRun, good: GoodAnswerConfig) -> tuple[Figure, ...]:
    """Returns the figures of a run that are no latencies of its answers."""
    result = result_of(run.tally)
    figures = [
        Figure("output", result.output_tokens_per_s, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure("requests", result.requests_per_s, Unit.REQUESTS_PER_S, Better.HIGHER),
        Figure("failed", result.failed, Unit.COUNT, Better.LOWER),
    ]
    if run.unsent:
        figures.append(Figure("not sent", run.unsent, Unit.COUNT, Better.LOWER))
    if good.ttft_ms or good.itl_ms:
        asked = result.succeeded + result.failed
        figures.append(Figure("goodput", run.good / result.duration_s, Unit.REQUESTS_PER_S, Better.HIGHER))
        figures.append(Figure("good", 100 * run.good / asked, Unit.PERCENT, Better.HIGHER))
        if good.itl_ms:
            figures.append(Figure("good at p99", 100 * run.good_at_p99 / asked, Unit.PERCENT, Better.HIGHER))
    late = distribution(run.lateness_s)
    return measured(
        *figures,
        Figure("sent late p50", late.p50 * 1e3, Unit.MS),
        Figure("sent late p99", late.p99 * 1e3, Unit.MS),
        Figure("sent late at most", late.maximum * 1e3, Unit.MS),
        Figure("client CPU", 100 * run.cpu_share, Unit.PERCENT),
    )


def _latency_figures(run: LoadRun, name: str) -> tuple[Figure, ...]:
    result = result_of(run.tally)
    found: Distribution = {"TTFT": result.ttft_s, "ITL": result.itl_s, "TPOT": result.tpot_s, "E2E": result.e2e_s}[name]
    values = {"mean": found.mean, "p50": found.p50, "p90": found.p90, "p99": found.p99, "max": found.maximum}
    return measured(*(Figure(each, value * 1e3, Unit.MS, Better.LOWER) for each, value in values.items()))


def _notes(point: _Point, targets: Sequence[Target], found: Sequence[_Measured]) -> list[str]:
    """Returns the errors of requests, and whether the figures may be those of the client."""
    notes: list[str] = []
    where = ", ".join(f"{name} {value}" for name, value in point.at.items() if name != "requests")
    for target, own in zip(targets, found, strict=True):
        notes += [f"error: {error}" for run in own.runs for error in run.tally.errors]
        if unsent := sum(run.unsent for run in own.runs):
            notes.append(f"{target.url}, {where}: {unsent} turns were not sent, because the one before failed")
        late_s = max((distribution(run.lateness_s).p99 for run in own.runs if run.lateness_s), default=0.0)
        if late_s > _LATE_S:
            notes.append(
                f"{target.url}, {where}: 1 request of 100 was sent at least {late_s * 1e3:.0f} ms after its time, so "
                "the load was less even than planned"
            )
        busy = max(run.cpu_share for run in own.runs)
        if busy > _BUSY:
            notes.append(
                f"{target.url}, {where}: the client used {busy * 100:.0f} % of one core, so the figures may be its "
                "own limit"
            )
    return notes


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
        if figure.better is not Better.NEITHER and figure.unit is not Unit.COUNT and others.get(figure.name)
    )


_TERMINAL_S = 0.5
_LINES_S = 10.0
_CLEAR = "\r\x1b[2K"


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a load before it runs."""

    name: str
    total: int
    """The number of its requests."""
    sends_for_s: float | None = None
    """How long requests are sent for; None if that follows from the answers."""

    def line(self, run: LoadRun, elapsed_s: float) -> str:
        tally = run.tally
        rate = tally.succeeded / elapsed_s if elapsed_s > 0 else 0.0
        left_s = self._left_s(run, elapsed_s)
        left = "" if left_s is None else f", {_duration(left_s)} left"
        return (
            f"{self.name}: {tally.succeeded} of {self.total} answered, {tally.failed} failed, {run.running} running, "
            f"{rate:.3g} answers/s{left}"
        )

    def _left_s(self, run: LoadRun, elapsed_s: float) -> float | None:
        if run.ended >= self.total:
            return None
        by_answers = elapsed_s * (self.total - run.ended) / run.ended if run.ended else None
        if self.sends_for_s is None or elapsed_s > self.sends_for_s:
            return by_answers
        return self.sends_for_s - elapsed_s


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@asynccontextmanager
async def shown(progress: Progress, run: LoadRun, out: TextIO) -> AsyncIterator[None]:
    """Shows the progress of ``run`` inside the block, and how it ended."""
    terminal = out.isatty()
    began = time.perf_counter()

    async def show() -> None:
        while True:
            await asyncio.sleep(_TERMINAL_S if terminal else _LINES_S)
            _print(out, progress.line(run, time.perf_counter() - began), "" if terminal else "\n")

    showing = asyncio.create_task(show())
    try:
        yield
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing
        _print(out, progress.line(run, time.perf_counter() - began), "\n")


def _print(out: TextIO, line: str, end: str) -> None:
    if out.isatty():
        # A line that wraps could not be taken away.
        line = _CLEAR + line[: shutil.get_terminal_size().columns - 1]
    # A reader that is gone does not end the measurement.
    with suppress(OSError):
        print(line, file=out, end=end, flush=True)
