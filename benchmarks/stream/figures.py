"""Computes the rows of the report from what the clients saw and the processes used. This module does no I/O."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.stream.floors import ChunkFloor, Crossing
from benchmarks.stream.servers import ENGINE, NODE, PROXY
from benchmarks.stream.stream_clients import CLIENTS, StreamLoadReport
from benchmarks.stream.variants import Comparison, Variant, comparisons
from pdserve.bench.report import Better, Figure, Row, Unit, measured

GAIN = "gain"
TARGET = "asked for at 1,024 streams"
FLOOR = "a chunk's floor"
CROSSING = "a token's way from the engine"
OVER_FLOOR = "over the floor"
OUTPUT = "steady output"
TTFT_MEAN, TTFT_P50 = "TTFT mean", "TTFT p50"
NODE_COST, PROXY_COST = "node CPU a token", "proxy CPU a token"


class Regime(enum.Enum):
    """The speed of the engine."""

    PACED = "paced"
    """The host keeps up: this regime shows what a token costs, and how late it comes."""
    SATURATED = "saturated"
    """The engine is as fast as its clients: this regime shows how much the host can deliver."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of one or more runs."""

    regime: Regime
    streams: int
    variant: str

    def __str__(self) -> str:
        return f"{self.regime.value}, {self.streams} streams, {self.variant}"


def figures_of(report: StreamLoadReport) -> tuple[Figure, ...]:
    """Returns the figures of one run. Costs are those of its steady part, in which only tokens flow, if it had one."""
    run, steady = report.run, report.steady
    tokens = steady if steady is not None and steady.tokens else run
    return measured(
        Figure(TTFT_MEAN, report.ttft_s.mean * 1e3, Unit.MS, Better.LOWER),
        Figure(TTFT_P50, report.ttft_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("TTFT p99", report.ttft_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("TPOT p50", report.tpot_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("TPOT p99", report.tpot_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("gap p99", report.gaps_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("output", run.tokens / run.seconds, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure(OUTPUT, tokens.tokens / tokens.seconds, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure("tokens a chunk", tokens.tokens / tokens.chunks, Unit.RATIO),
        Figure(NODE_COST, tokens.cpu_s[NODE] / tokens.tokens * 1e6, Unit.US, Better.LOWER),
        Figure(PROXY_COST, tokens.cpu_s[PROXY] / tokens.tokens * 1e6, Unit.US, Better.LOWER),
        Figure("node CPU, all : tokens", run.cpu_s[NODE] / run.tokens * 1e6, Unit.US, Better.LOWER),
        Figure("proxy CPU, all : tokens", run.cpu_s[PROXY] / run.tokens * 1e6, Unit.US, Better.LOWER),
        *(
            Figure(f"{name} busy", tokens.cpu_s[name] / tokens.seconds, Unit.RATIO)
            for name in (NODE, PROXY, ENGINE, CLIENTS)
        ),
        Figure("node peak", report.peak_mib[NODE], Unit.MIB, Better.LOWER),
        Figure("proxy peak", report.peak_mib[PROXY], Unit.MIB, Better.LOWER),
    )


def medians(runs: Sequence[Sequence[Figure]]) -> tuple[Figure, ...]:
    """Returns the median of each figure over runs under the same condition."""
    values: dict[str, list[float]] = {}
    for figures in runs:
        for figure in figures:
            values.setdefault(figure.name, []).append(figure.value)
    return tuple(msgspec.structs.replace(figure, value=statistics.median(values[figure.name])) for figure in runs[0])


def report_rows(
    found: Sequence[Variant], runs: Mapping[Condition, tuple[Figure, ...]], floor: ChunkFloor, way: Crossing
) -> tuple[Row, ...]:
    """Returns what was measured, what each part gains, and how far the whole is from the least that is possible."""
    measured_rows = [
        Row(at.regime.value, {"streams": at.streams, "variant": at.variant}, figures) for at, figures in runs.items()
    ]
    places = dict.fromkeys((at.regime, at.streams) for at in runs)
    gains = [
        _gain(Condition(regime, streams, ""), comparison, runs)
        for comparison in comparisons(found)
        for regime, streams in places
    ]
    return (
        Row(
            FLOOR,
            {},
            (
                Figure("write", floor.write_s * 1e6, Unit.US, Better.LOWER),
                Figure("read", floor.read_s * 1e6, Unit.US, Better.LOWER),
            ),
        ),
        Row(
            CROSSING,
            {},
            (
                Figure("a step at once", way.at_once_s * 1e6, Unit.US, Better.LOWER),
                Figure("token by token", way.one_by_one_s * 1e6, Unit.US, Better.LOWER),
            ),
        ),
        *measured_rows,
        *gains,
        *_targets(gains),
        *(_over_floor(at, figures, floor) for at, figures in runs.items() if at.regime is Regime.PACED),
    )


def _gain(place: Condition, comparison: Comparison, runs: Mapping[Condition, tuple[Figure, ...]]) -> Row:
    old, new = (
        {figure.name: figure for figure in runs[dataclasses.replace(place, variant=variant.name)]}
        for variant in (comparison.without, comparison.having)
    )
    names = [
        (TTFT_MEAN, Better.NEITHER),
        (TTFT_P50, Better.NEITHER),
        ("gap p99", Better.NEITHER),
        (OUTPUT, Better.HIGHER if place.regime is Regime.SATURATED else Better.NEITHER),
        (NODE_COST, Better.HIGHER),
        (PROXY_COST, Better.HIGHER),
    ]
    return Row(
        GAIN,
        {
            "regime": place.regime.value,
            "streams": place.streams,
            "part": comparison.parts,
            "others": comparison.others,
        },
        measured(
            *(_times_better(old[name], new[name], judged) for name, judged in names if name in old and name in new)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """The gain that other projects report for a part, which pdserve is meant to reach."""

    part: str
    figure: str
    times: float


_TARGET_STREAMS = 1024
_TARGETS = (
    _Target("dispatch", TTFT_MEAN, 1 / (1 - 0.41)),
    _Target("dispatch", TTFT_P50, 1 / (1 - 0.69)),
    _Target("notify+fast-path", OUTPUT, 1.20),
    _Target("interval", OUTPUT, 1.57),
)


def _targets(gains: Sequence[Row]) -> list[Row]:
    """Returns each target beside the gain that was measured for it."""
    return [
        Row(
            TARGET,
            {"part": target.part, "figure": target.figure},
            (
                Figure("asked for", target.times, Unit.RATIO),
                *(
                    Figure(f"{row.at['regime']}, others {row.at['others']}", figure.value, Unit.RATIO)
                    for row in gains
                    if row.at["part"] == target.part and row.at["streams"] == _TARGET_STREAMS
                    for figure in row.figures
                    if figure.name == target.figure
                ),
            ),
        )
        for target in _TARGETS
        if any(row.at["part"] == target.part and row.at["streams"] == _TARGET_STREAMS for row in gains)
    ]


def _times_better(old: Figure, new: Figure, judged: Better) -> Figure:
    over, under = (new.value, old.value) if old.better is Better.HIGHER else (old.value, new.value)
    return Figure(old.name, over / under if under else math.nan, Unit.RATIO, judged)


def _over_floor(at: Condition, figures: Sequence[Figure], floor: ChunkFloor) -> Row:
    """Returns the cost over that of the system calls: the node writes each chunk, and the proxy reads and writes it."""
    costs = {figure.name: figure.value for figure in figures}
    return Row(
        OVER_FLOOR,
        {"streams": at.streams, "variant": at.variant},
        measured(
            Figure("node", costs[NODE_COST] / (floor.write_s * 1e6), Unit.RATIO, Better.LOWER),
            Figure("proxy", costs[PROXY_COST] / ((floor.read_s + floor.write_s) * 1e6), Unit.RATIO, Better.LOWER),
        ),
    )
