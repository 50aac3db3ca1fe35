"""Reports and streams for the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.batching import Pair, compared, load_figures
from pdserve.bench.report import Better, Figure, Machine, Report, Row, Unit
from pdserve.bench.streamed_answer import Stream, summarise
from pdserve.config import Batching

MACHINE = Machine("a CPU", 2, 24.0, "", "3.11", "2.13", "0.1", "2026-01-01 00:00")


def stream(started: float, arrivals: Sequence[float], token_ids: Sequence[int] = ()) -> Stream:
    """Returns the stream of an answer whose tokens come at ``arrivals``."""
    return Stream(started, list(arrivals), arrivals[-1], len(arrivals), list(token_ids))


def report(*rows: Row, benchmark: str = "batching") -> Report:
    return Report(benchmark, MACHINE, {"PDSERVE_SEED": "0"}, ("a note",), rows)


def ratio(value: float, better: Better = Better.HIGHER, name: str = "TTFT mean", concurrency: int = 4) -> Row:
    return Row("ratios", {"concurrency": concurrency}, (Figure(name, value, Unit.RATIO, better),))


def batching_report() -> Report:
    """Returns a report of two concurrencies, whose figures are easy to check."""
    pairs = [
        Pair(
            concurrency,
            {
                Batching.STATIC: [[stream(0, [9, 10, 11], [1, 2, 3])]],
                Batching.CONTINUOUS: [[stream(0, [1, 2, 3], [1, 2, 4])]],
            },
        )
        for concurrency in (1, 4)
    ]
    rows = [
        Row("batching", {"concurrency": pair.concurrency, "mode": mode.value}, load_figures(summarise(*runs)))
        for pair in pairs
        for mode, runs in pair.runs.items()
    ]
    return report(*rows, *(compared(pair) for pair in pairs))
