"""Outcomes of ``benchmarks goodput`` whose figures are easy to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.goodput.figures import GoodputRun, ShapeOutcome, Unloaded, rows
from benchmarks.goodput.workload import LoadPoint, Loop, Tightness
from pdserve.bench.report import Report
from pdserve.bench.streamed_answer import AnswerTargets, Stream
from tests.bench.reports import report

SHAPE = "8/5"
CLOSED = LoadPoint(SHAPE, Loop.CLOSED, 4)
OPEN = LoadPoint(SHAPE, Loop.OPEN, 75, 1.5)
TARGETS = {Tightness.TIGHT: AnswerTargets(1.0, 0.025), Tightness.LOOSE: AnswerTargets(1.0, 0.06)}


def answer(ttft_s: float, itl_s: float, tokens: int = 5) -> Stream:
    arrivals_s = [ttft_s + index * itl_s for index in range(tokens)]
    return Stream(0.0, arrivals_s, arrivals_s[-1], tokens)


def goodput_run(itls_s: Sequence[float], seconds: float = 2.0, ttft_s: float = 0.5) -> GoodputRun:
    """Returns a run with an answer for each of ``itls_s``."""
    return GoodputRun([answer(ttft_s, itl_s) for itl_s in itls_s], seconds)


def outcome(runs: Mapping[LoadPoint, Mapping[str, Sequence[GoodputRun]]]) -> ShapeOutcome:
    return ShapeOutcome(SHAPE, Unloaded(0.25, 0.0125, 2.0), TARGETS, runs)


def three_systems() -> ShapeOutcome:
    """Returns two rounds of three systems: ``auto`` is as fast as ``mixed`` at first and steadier than both."""
    by_system = {
        "mixed": [goodput_run([0.02, 0.05]), goodput_run([0.05, 0.05])],
        "always": [goodput_run([0.05, 0.07]), goodput_run([0.05, 0.07])],
        "auto": [goodput_run([0.02, 0.02]), goodput_run([0.02, 0.05], ttft_s=0.6)],
    }
    return outcome({CLOSED: by_system, OPEN: by_system})


def goodput_report() -> Report:
    return report(*rows([three_systems()]), benchmark="goodput")
