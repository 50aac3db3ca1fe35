"""Turns the streams of ``benchmarks goodput`` into its figures, its ratios, and what they say of the wanted ones.

*Goodput* is the number of good answers a second: those that met the targets of TTFT and ITL. An answer meets its ITL
target if its TPOT does, as in DistServe's paper and in vLLM's ``bench serve --goodput``; ``p99`` in a figure's name
asks it of the 99th percentile of the answer's gaps, which shows stalls that a mean hides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bootstrap import HIGH, LOW, interval
from benchmarks.goodput.workload import LoadPoint, Loop, Tightness
from benchmarks.settings import GoodputSystem
from pdserve.bench.report import Better, Figure, Row, Unit, measured
from pdserve.bench.streamed_answer import AnswerTargets, LoadResult, Stream, summarise

AUTO, MIXED, ALWAYS = (system.value for system in (GoodputSystem.AUTO, GoodputSystem.MIXED, GoodputSystem.ALWAYS))
SYSTEM = "system"
UNLOADED = "without other load"
RATE = "rate"


def goodput_name(tightness: Tightness, at_p99: bool = False) -> str:
    return f"goodput {tightness.value} p99" if at_p99 else f"goodput {tightness.value}"


GOODPUTS = tuple(goodput_name(tightness, at_p99) for tightness in Tightness for at_p99 in (False, True))
OUTPUT_RATIO, TTFT_RATIO, STEADINESS = "output : mixed", "TTFT p50 : mixed", "ITL p99 : p50"


_SERVED = 0.1
"""If not even this share of the answers to a load is good in any system, a ratio of goodputs says nothing."""


def against(loop: Loop) -> str:
    """Returns what rows of ratios at single loads are of."""
    return f"auto against the better of mixed and always, {loop.value}"


AGAINST_BEST = "auto against the better of mixed and always, highest goodput of all loads"
AGAINST_PEER = "auto against other servers"


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What the first system does: with one client, and as much as it can with the most clients."""

    ttft_s: float
    itl_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class GoodputRun:
    """One run of one system."""

    streams: Sequence[Stream]
    seconds: float
    """The time that its requests are counted over: that of the arrivals, or in a closed loop the whole run."""


@dataclass(frozen=True, slots=True)
class ShapeOutcome:
    """All that was measured of one shape. Each system has as many runs as the others, in turns with theirs."""

    shape: str
    unloaded: Unloaded
    targets: Mapping[Tightness, AnswerTargets]
    runs: Mapping[LoadPoint, Mapping[str, Sequence[GoodputRun]]]

    def goodputs(self, point: LoadPoint, runs: Sequence[GoodputRun]) -> dict[str, float]:
        """Returns the good answers a second by the name of their figure, over all ``runs`` together."""
        seconds = sum(run.seconds for run in runs)
        return {name: sum(good) / seconds for name, good in self.good(point, runs).items()}

    def good(self, point: LoadPoint, runs: Sequence[GoodputRun]) -> dict[str, list[int]]:
        """Returns the number of good answers in each run by the name of the figure."""
        met: dict[str, Callable[[Stream], bool]] = {}
        for tightness in point.measured_by:
            targets = self.targets[tightness]
            met[goodput_name(tightness)] = targets.met_in_mean
            met[goodput_name(tightness, at_p99=True)] = targets.met_at_p99
        return {name: [sum(map(is_met, run.streams)) for run in runs] for name, is_met in met.items()}


def rows(outcomes: Iterable[ShapeOutcome]) -> list[Row]:
    """Returns all rows of the report: targets, then each system at each load, then ratios."""
    found = list(outcomes)
    systems = [row for outcome in found for point in outcome.runs for row in _system_rows(outcome, point)]
    ratios = [row for outcome in found for point in outcome.runs for row in _ratio_rows(outcome, point)]
    best = [row for outcome in found for row in _best_rows(outcome)]
    return [*map(_unloaded_row, found), *systems, *ratios, *best]


def _unloaded_row(outcome: ShapeOutcome) -> Row:
    unloaded = outcome.unloaded
    (ttft_s,) = {targets.ttft_s for targets in outcome.targets.values()}
    figures = [
        Figure("TTFT mean", unloaded.ttft_s * 1e3, Unit.MS, Better.LOWER),
        Figure("ITL p50", unloaded.itl_s * 1e3, Unit.MS, Better.LOWER),
        Figure("requests at most", unloaded.requests_per_s, Unit.REQUESTS_PER_S, Better.HIGHER),
        Figure("TTFT target", ttft_s * 1e3, Unit.MS),
    ]
    for tightness, targets in outcome.targets.items():
        figures.append(Figure(f"ITL target {tightness.value}", targets.itl_s * 1e3, Unit.MS))
    return Row(UNLOADED, {"shape": outcome.shape}, measured(*figures))


def _system_rows(outcome: ShapeOutcome, point: LoadPoint) -> list[Row]:
    found = []
    for system, runs in outcome.runs[point].items():
        result = _together(runs)
        figures = [
            Figure(RATE, point.rate, Unit.REQUESTS_PER_S),
            *(
                Figure(name, value, Unit.REQUESTS_PER_S, Better.HIGHER)
                for name, value in outcome.goodputs(point, runs).items()
            ),
            Figure("output", result.output_tokens_per_s, Unit.TOKENS_PER_S, Better.HIGHER),
            Figure("TTFT p50", result.ttft_s.p50 * 1e3, Unit.MS, Better.LOWER),
            Figure("TTFT p99", result.ttft_s.p99 * 1e3, Unit.MS, Better.LOWER),
            Figure("ITL p50", result.itl_s.p50 * 1e3, Unit.MS, Better.LOWER),
            Figure("ITL p99", result.itl_s.p99 * 1e3, Unit.MS, Better.LOWER),
            Figure("requests", result.succeeded, Unit.COUNT),
            Figure("failed", result.failed, Unit.COUNT, Better.LOWER),
        ]
        found.append(Row(point.loop.value, {**point.at, SYSTEM: system}, measured(*figures)))
    return found


def _ratio_rows(outcome: ShapeOutcome, point: LoadPoint) -> list[Row]:
    by_system = outcome.runs[point]
    ours = by_system.get(AUTO)
    if ours is None:
        return []
    goodputs = {system: outcome.goodputs(point, runs) for system, runs in by_system.items()}
    figures = [figure for name in goodputs[AUTO] for figure in _against_better_with_interval(outcome, point, name)]
    if MIXED in by_system:
        figures += _paired(ours, by_system[MIXED], MIXED)
    itl = _together(ours).itl_s
    figures.append(Figure(STEADINESS, _ratio(itl.p99, itl.p50), Unit.RATIO, Better.LOWER))
    found = [Row(against(point.loop), point.at, measured(*figures))]
    for peer, runs in by_system.items():
        if peer not in (AUTO, MIXED, ALWAYS):
            figures = [_goodput_ratio(name, goodputs[AUTO], [goodputs[peer]]) for name in goodputs[AUTO]]
            figures += _paired(ours, runs, "peer")
            found.append(Row(f"{AGAINST_PEER}, {point.loop.value}", {**point.at, "peer": peer}, measured(*figures)))
    return found


def _best_rows(outcome: ShapeOutcome) -> list[Row]:
    """Returns the ratios of the highest goodput that each system has at any load."""
    best: dict[str, dict[str, float]] = {}
    for point, by_system in outcome.runs.items():
        for system, runs in by_system.items():
            own = best.setdefault(system, dict.fromkeys(GOODPUTS, 0.0))
            for name, value in outcome.goodputs(point, runs).items():
                own[name] = max(own[name], value)
    figures = measured(*_against_better(best)) if AUTO in best else ()
    return [Row(AGAINST_BEST, {"shape": outcome.shape}, figures)] if figures else []


def _against_better_with_interval(outcome: ShapeOutcome, point: LoadPoint, name: str) -> list[Figure]:
    """Returns a load's ratio of goodputs and its interval; nothing where no system serves the load within the targets.

    Rounds are drawn for both systems alike.
    """
    by_system = outcome.runs[point]
    systems = [system for system in (AUTO, MIXED, ALWAYS) if system in by_system]
    good = {system: outcome.good(point, by_system[system])[name] for system in systems}
    shares = [sum(good[system]) / sum(len(run.streams) for run in by_system[system]) for system in good]
    if len(systems) < 2 or max(shares) < _SERVED:
        return []
    seconds = {system: [run.seconds for run in by_system[system]] for system in good}
    better = max(systems[1:], key=lambda other: sum(good[other]) / sum(seconds[other]))

    def ratio(rounds: Sequence[int]) -> float:
        ours, theirs = (
            sum(good[system][i] for i in rounds) / sum(seconds[system][i] for i in rounds) for system in (AUTO, better)
        )
        return math.inf if ours and not theirs else _ratio(ours, theirs)

    rounds = range(len(good[AUTO]))
    figure = Figure(name, ratio(rounds), Unit.RATIO, Better.HIGHER)
    return [figure, *interval(name, len(rounds), ratio)]


def _against_better(goodputs: Mapping[str, Mapping[str, float]]) -> list[Figure]:
    others = [goodputs[system] for system in (MIXED, ALWAYS) if system in goodputs]
    return [_goodput_ratio(name, goodputs[AUTO], others) for name in goodputs[AUTO]] if others else []


def _goodput_ratio(name: str, ours: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> Figure:
    return Figure(name, _ratio(ours[name], max(other[name] for other in others)), Unit.RATIO, Better.HIGHER)


def _paired(ours: Sequence[GoodputRun], theirs: Sequence[GoodputRun], name: str) -> list[Figure]:
    """Returns the medians of the ratios of runs that followed each other: what slowed one slowed the other too."""
    pairs = [(summarise(our.streams), summarise(their.streams)) for our, their in zip(ours, theirs, strict=True)]
    outputs = [_ratio(our.output_tokens_per_s, their.output_tokens_per_s) for our, their in pairs]
    ttfts = [_ratio(our.ttft_s.p50, their.ttft_s.p50) for our, their in pairs]
    return [
        Figure(f"output : {name}", _median(outputs), Unit.RATIO, Better.HIGHER),
        Figure(f"TTFT p50 : {name}", _median(ttfts), Unit.RATIO, Better.LOWER),
    ]


def _together(runs: Sequence[GoodputRun]) -> LoadResult:
    return summarise(*(run.streams for run in runs))


def _ratio(over: float, under: float) -> float:
    return over / under if under else float("nan")


def _median(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else float("nan")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A bound on a ratio of ``auto``."""

    meaning: str
    rows: tuple[str, ...]
    figure: str
    bound: float
    better: Better

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.better is Better.HIGHER else value <= self.bound

    def _ends(self, found: Mapping[str, float]) -> tuple[float, float]:
        """Returns the ends of the figure's interval, both its value if it has none. JSON has no infinite one."""
        low = found.get(self.figure + LOW)
        if low is None:
            return found[self.figure], found[self.figure]
        return low, found.get(self.figure + HIGH, math.inf)

    def verdict(self, report_rows: Iterable[Row]) -> str:
        """Returns a sentence that says where the bound holds, and the worst place; empty without such a ratio."""
        values = [
            (found[self.figure], *self._ends(found), _place(row))
            for row in report_rows
            if row.what in self.rows and self.figure in (found := {each.name: each.value for each in row.figures})
        ]
        if not values:
            return ""
        worst, _, _, where = sorted(values)[0 if self.better is Better.HIGHER else -1]
        held = sum(self.holds(low) and self.holds(high) for _, low, high, _ in values)
        undecided = sum(self.holds(low) is not self.holds(high) for _, low, high, _ in values)
        sign = "at least" if self.better is Better.HIGHER else "at most"
        verdict = "MISSED" if held + undecided < len(values) else "undecided" if undecided else "met"
        return (
            f"{verdict}: {self.meaning}, wanted {sign} {self.bound:g}, holds at {held} of {len(values)}"
            f"{f', undecided at {undecided}' if undecided else ''}; the worst is {worst:.2f} ({where})"
        )


def _place(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.at.items())


_LOADS = tuple(map(against, Loop))
WANTED = (
    *(
        Wanted(f"auto's {name} : the better other's", _LOADS, name, 1.0, Better.HIGHER)
        for name in map(goodput_name, Tightness)
    ),
    Wanted(
        "auto's highest goodput tight : the better other's",
        (AGAINST_BEST,),
        goodput_name(Tightness.TIGHT),
        1.3,
        Better.HIGHER,
    ),
    Wanted("auto's output : mixed's", _LOADS, OUTPUT_RATIO, 0.95, Better.HIGHER),
    Wanted("auto's TTFT p50 : mixed's", _LOADS, TTFT_RATIO, 1.3, Better.LOWER),
    Wanted("auto's ITL p99 : its median", _LOADS, STEADINESS, 2.0, Better.LOWER),
)


def verdicts(report_rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns a sentence for each wanted ratio that was measured."""
    return tuple(verdict for wanted in WANTED if (verdict := wanted.verdict(report_rows)))
