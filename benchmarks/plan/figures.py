"""Lays what was predicted of runs beside what was measured, and says how near the one is to the other.

A run's latencies are those of a few dozen requests, and a machine's speed changes from one run to the next. So all
rounds of a load are taken together, and each ratio has the interval in which it lies if its rounds are drawn anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, geometric_mean

import numpy as np

from benchmarks.bootstrap import HIGH, LOW, interval
from pdserve.bench.report import Better, Figure, Row, Unit, measured
from pdserve.bench.streamed_answer import Stream, summarise
from pdserve.plan.cluster import Lived
from pdserve.plan.profile import NodeSpeed
from pdserve.plan.sizing import not_exceeded, spread_gaps

SYSTEM, RATE = "system", "rate %"
BESIDE = "predicted and measured"
PACE, LEAST_PACE, MOST_PACE = "pace", "pace, least", "pace, most"
WITHIN = {"output": 0.10, "TTFT p90": 0.20, "ITL p90": 0.20}
"""How far a prediction may be from what is measured, as a share of that."""
MET, UNDECIDED, MISSED = "met: ", "undecided: ", "MISSED: "
BY_PROFILE = "by the profile alone, "
VERDICTS = (MET, UNDECIDED, MISSED, BY_PROFILE)
"""How a sentence begins that says whether predictions were near enough."""
_ALWAYS = frozenset({"output"})
"""Where more requests come than are answered, they wait the longer the longer they come: latencies are only shown."""
_WHOLE = 100
"""The rate, in percent and at the profile's pace, up to which a node answers as many requests as come."""
_SHARES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Run:
    """One round of a load: what was predicted for the system's pace around it, and what came."""

    rate: float
    """So many requests came a second."""
    speed: NodeSpeed
    """What the profile says of such nodes."""
    pace: float
    """How many times as long as in the profile the system took."""
    expected: Lived
    """What the profile and the pace predict."""
    expected_of_profile: Lived
    """What the profile alone predicts."""
    streams: Sequence[Stream]


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rounds of one load on one system."""

    system: str
    percent: int
    runs: Sequence[Run]


Rounds = Sequence[int]
"""The numbers of the rounds that count, some of them perhaps twice."""
_OfRounds = Callable[[Rounds], float]


def row_of(outcome: Outcome) -> Row:
    """Returns the figures of all rounds together."""
    paces = [run.pace for run in outcome.runs]
    figures = [
        Figure("rate", fmean(run.rate for run in outcome.runs), Unit.REQUESTS_PER_S),
        Figure(PACE, geometric_mean(paces), Unit.RATIO),
        Figure(LEAST_PACE, min(paces), Unit.RATIO),
        Figure(MOST_PACE, max(paces), Unit.RATIO),
    ]
    found = _measured([run.streams for run in outcome.runs])
    speeds = [run.speed for run in outcome.runs]
    expected = _expected([run.expected for run in outcome.runs], speeds)
    alone = _expected([run.expected_of_profile for run in outcome.runs], speeds)
    for name, value in found.items():
        figures += _beside(name, expected[name], alone[name], value, len(outcome.runs))
    return Row(BESIDE, {SYSTEM: outcome.system, RATE: outcome.percent}, measured(*figures))


def ratio_name(name: str) -> str:
    return f"{name} predicted : measured"


def alone_name(name: str) -> str:
    """Returns the name of the ratio of what the profile alone predicts, without the system's pace."""
    return f"{name} predicted by the profile alone : measured"


def verdict(rows: Sequence[Row], name: str) -> str:
    """Returns a sentence that says at how many loads a prediction was near enough, and where it was farthest off.

    It was near enough where the whole interval is. Where only a part of the interval is, or where one round has none,
    more rounds would decide.
    """
    bound, ratio = WITHIN[name], ratio_name(name)
    judged = _judged(rows, name)
    ratios = [(row.figure(ratio).value, *_ends(row, ratio), row) for row in judged]
    near = sum(low >= 1 - bound and high <= 1 + bound for _, low, high, _ in ratios)
    far = sum(high < 1 - bound or low > 1 + bound for _, low, high, _ in ratios)
    undecided = len(ratios) - near - far
    worst, where = max(
        ((value, f"{row.at[SYSTEM]} at {row.at[RATE]} %") for value, _, _, row in ratios),
        key=lambda found: abs(found[0] - 1),
        default=(math.nan, "no load"),
    )
    told = MISSED if far or not ratios else UNDECIDED if undecided else MET
    return (
        f"{told}{name} predicted : measured, wanted within {bound:.0%}"
        f"{'' if name in _ALWAYS else ' where the machine can answer all'}, "
        f"holds at {near} of {len(ratios)} loads{f', undecided at {undecided}' if undecided else ''}; "
        f"the farthest is {worst:.2f} ({where})"
    )


def by_the_profile_alone(rows: Sequence[Row]) -> str:
    """Returns a sentence that says how often the profile would have been near enough without the system's pace."""
    found = []
    for name, bound in WITHIN.items():
        ratios = [row.figure(alone_name(name)).value for row in _judged(rows, name)]
        near = sum(abs(value - 1) <= bound for value in ratios)
        found.append(f"{name} at {near} of {len(ratios)} loads")
    return f"{BY_PROFILE}the ratio itself is within the same bounds for {', '.join(found)}"


def _judged(rows: Sequence[Row], name: str) -> list[Row]:
    """Returns the loads at which a prediction is judged."""
    return [
        row
        for row in rows
        if any(figure.name == ratio_name(name) for figure in row.figures)
        and (name in _ALWAYS or int(row.at[RATE]) * row.figure(PACE).value <= _WHOLE)
    ]


def _ends(row: Row, ratio: str) -> tuple[float, float]:
    """Returns the ends of a ratio's interval. One round says nothing of how far others would differ."""
    found = {figure.name: figure.value for figure in row.figures}
    return found.get(ratio + LOW, -math.inf), found.get(ratio + HIGH, math.inf)


def _beside(name: str, expected: _OfRounds, alone: _OfRounds, found: _OfRounds, rounds: int) -> list[Figure]:
    def ratio(predicted: _OfRounds, of: Rounds) -> float:
        value = found(of)
        return predicted(of) / value if value else math.nan

    every, unit = range(rounds), Unit.TOKENS_PER_S if name == "output" else Unit.MS
    figures = [
        Figure(f"{name} predicted", expected(every), unit),
        Figure(f"{name} measured", found(every), unit),
        Figure(ratio_name(name), ratio(expected, every), Unit.RATIO, Better.NEITHER),
    ]
    if name in WITHIN:
        figures += interval(ratio_name(name), rounds, partial(ratio, expected))
        figures.append(Figure(alone_name(name), ratio(alone, every), Unit.RATIO, Better.NEITHER))
    return figures


def _expected(rounds: Sequence[Lived], speeds: Sequence[NodeSpeed]) -> dict[str, _OfRounds]:
    """Returns the figures of what was predicted of some rounds, by their names."""
    requests = [[answer.request for answer in lived.answers] for lived in rounds]
    tokens = [sum(request.output_tokens for request in of_round) for of_round in requests]
    seconds = [lived.ended_at - of_round[0].at_s for lived, of_round in zip(rounds, requests, strict=True)]
    ttft = _Latencies([_alike([answer.ttft_s for answer in lived.answers]) for lived in rounds])
    itl = _Latencies([spread_gaps(lived.gaps, speed) for lived, speed in zip(rounds, speeds, strict=True)])
    return {"output": _output(tokens, seconds), **ttft.figures("TTFT"), **itl.figures("ITL")}


def _measured(rounds: Sequence[Sequence[Stream]]) -> dict[str, _OfRounds]:
    """Returns the same figures of what clients saw."""
    results = [summarise(streams) for streams in rounds]
    output = _output([result.output_tokens for result in results], [result.duration_s for result in results])
    ttft = _Latencies([_alike([stream.ttft_s for stream in streams]) for streams in rounds])
    itl = _Latencies([_alike([gap for stream in streams for gap in stream.itls_s]) for streams in rounds])
    return {"output": output, **ttft.figures("TTFT"), **itl.figures("ITL")}


def _output(tokens: Sequence[int], seconds: Sequence[float]) -> _OfRounds:
    return lambda rounds: sum(tokens[i] for i in rounds) / sum(seconds[i] for i in rounds)


class _Latencies:
    """Latencies of several rounds."""

    def __init__(self, rounds: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Each round has its values, in seconds, and how often each counts."""
        values = np.concatenate([values for values, _ in rounds])
        numbers = np.repeat(np.arange(len(rounds)), [len(values) for values, _ in rounds])
        order = np.argsort(values)
        self._count = len(rounds)
        self._values_ms, self._rounds = 1e3 * values[order], numbers[order]
        self._weights = np.concatenate([weights for _, weights in rounds])[order]

    def figures(self, name: str) -> dict[str, _OfRounds]:
        return {f"{name} p{share}": partial(self._quantile, share) for share in _SHARES}

    def _quantile(self, share: int, rounds: Rounds) -> float:
        """Returns what so many of 100 values do not exceed, in ms; NaN without values."""
        times = np.bincount(np.asarray(rounds), minlength=self._count)
        upto = np.cumsum(self._weights * times[self._rounds])
        if not len(upto) or not upto[-1]:
            return math.nan
        return not_exceeded(self._values_ms, upto, share)


def _alike(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(values), np.ones(len(values))
