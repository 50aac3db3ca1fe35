"""Tests ``benchmarks host``, whose ratios ``pdserve bench compare`` checks."""

from __future__ import annotations

import msgspec

from benchmarks import host
from benchmarks.settings import BenchHostConfig, HostBenchConfig
from pdserve.bench.report import Unit, changes


def test_the_hosts_part_of_a_step_is_timed_in_ratios_that_are_compared() -> None:
    report = host.run(BenchHostConfig(HostBenchConfig((3,), (40,))))
    assert [row.at for row in report.rows] == [
        {"requests": 3, "context": 40, "path": path}
        for path in ("in turn", "ahead", "ranks", "ranks, window", "ranks, states")
    ]
    ratios = [figure for row in report.rows for figure in row.figures if figure.unit is Unit.RATIO]
    assert [figure.name for figure in ratios] == [
        *["CPU : wanted"] * 2,
        *["CPU : wanted", "message : wanted"] * 3,
    ]
    assert all(figure.value > 0 for figure in ratios)
    assert all(figure.value < 1 for figure in ratios if figure.name == "message : wanted")
    slower = [
        msgspec.structs.replace(
            row, figures=tuple(msgspec.structs.replace(figure, value=2 * figure.value) for figure in row.figures)
        )
        for row in report.rows
    ]
    found = changes(report, msgspec.structs.replace(report, rows=tuple(slower)), 0.3)
    assert [change.worse for change in found] == [True] * len(ratios)
