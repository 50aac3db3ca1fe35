"""Tests how times of clients and costs of processes become figures, gains and their targets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.stream.figures import (
    CROSSING,
    FLOOR,
    GAIN,
    NODE_COST,
    OUTPUT,
    OVER_FLOOR,
    PROXY_COST,
    TARGET,
    Condition,
    Regime,
    figures_of,
    medians,
    report_rows,
)
from benchmarks.stream.floors import ChunkFloor, Crossing, chunk_floor, crossing
from benchmarks.stream.stream_clients import Span, StreamLoadReport
from benchmarks.stream.stream_plot import write_plot
from benchmarks.stream.variants import variants
from pdserve.bench.report import Figure, Report, changes
from pdserve.bench.streamed_answer import distribution
from tests.bench.reports import report

WHOLE = Span(4.0, 1000, 500, {"node": 1.0, "proxy": 0.8, "engine": 0.1, "clients": 0.2})
STEADY = Span(2.0, 800, 400, {"node": 0.4, "proxy": 0.2, "engine": 0.1, "clients": 0.1})
LOAD = StreamLoadReport(
    0,
    (),
    WHOLE,
    STEADY,
    distribution([0.1, 0.3]),
    distribution([0.01]),
    distribution([0.02]),
    {"node": 99.0, "proxy": 55.0},
)


def values(figures: tuple[Figure, ...]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


def faster(times: float) -> StreamLoadReport:
    steady = msgspec.structs.replace(
        STEADY, seconds=2.0 / times, cpu_s={name: used / times for name, used in STEADY.cpu_s.items()}
    )
    return msgspec.structs.replace(LOAD, steady=steady, ttft_s=distribution([0.1 / times, 0.3 / times]))


def stream_report(gains: dict[str, float], streams: int = 1024) -> Report:
    found = variants(list(gains))
    runs = {
        Condition(regime, streams, name): figures_of(faster(times))
        for regime in Regime
        for name, times in gains.items()
    }
    return report(*report_rows(found, runs, ChunkFloor(4e-6, 1e-6), Crossing(2e-7, 1e-6)), benchmark="stream")


def test_costs_are_of_the_steady_part() -> None:
    found = values(figures_of(LOAD))
    assert found[NODE_COST] == pytest.approx(500.0)
    assert found[PROXY_COST] == pytest.approx(250.0)
    assert found["node CPU, all : tokens"] == pytest.approx(1000.0)
    assert found[OUTPUT] == pytest.approx(400.0)
    assert found["output"] == pytest.approx(250.0)
    assert found["TTFT mean"] == pytest.approx(200.0)
    assert found["tokens a chunk"] == 2.0
    assert found["clients busy"] == pytest.approx(0.05)
    assert found["node peak"] == 99.0


def test_without_a_steady_part_they_are_of_the_whole_run() -> None:
    found = values(figures_of(msgspec.structs.replace(LOAD, steady=None)))
    assert found[NODE_COST] == pytest.approx(1000.0)


def test_of_several_runs_the_median_counts() -> None:
    found = values(medians([figures_of(faster(times)) for times in (1.0, 4.0, 2.0)]))
    assert found[NODE_COST] == pytest.approx(250.0)


def test_gains_and_what_was_asked_for() -> None:
    made = stream_report({"off": 1.0, "dispatch": 2.0, "on": 10.0, "on-interval": 4.0})
    gains = {(row.at["regime"], row.at["part"], row.at["others"]): row for row in made.rows_of(GAIN)}
    assert gains["paced", "dispatch", "off"].figure(NODE_COST).value == pytest.approx(2.0)
    assert gains["saturated", "all", "off"].figure(OUTPUT).value == pytest.approx(10.0)
    assert gains["saturated", "interval", "on"].figure(PROXY_COST).value == pytest.approx(2.5)
    targets = {(row.at["part"], row.at["figure"]): row for row in made.rows_of(TARGET)}
    assert targets["dispatch", "TTFT p50"].figure("asked for").value == pytest.approx(3.23, abs=0.01)
    assert targets["dispatch", "TTFT p50"].figure("paced, others off").value == pytest.approx(2.0)
    assert targets["interval", OUTPUT].figure("saturated, others on").value == pytest.approx(2.5)
    assert ("notify+fast-path", OUTPUT) not in targets


def test_targets_are_for_1024_streams() -> None:
    assert stream_report({"off": 1.0, "dispatch": 2.0}, streams=64).rows_of(TARGET) == []


def test_costs_over_the_floor() -> None:
    made = stream_report({"off": 1.0})
    (row,) = made.rows_of(OVER_FLOOR)
    assert row.figure("node").value == pytest.approx(500 / 4)
    assert row.figure("proxy").value == pytest.approx(250 / 5)
    assert made.rows_of(FLOOR)[0].figure("read").value == pytest.approx(1.0)
    measured = chunk_floor()
    assert measured.write_s > 0
    assert measured.read_s > 0


def test_what_a_token_costs_on_its_way_from_the_engine() -> None:
    (row,) = stream_report({"off": 1.0}).rows_of(CROSSING)
    assert row.figure("a step at once").value == pytest.approx(0.2)
    assert row.figure("token by token").value == pytest.approx(1.0)
    measured = crossing()
    assert measured.at_once_s > 0
    assert measured.one_by_one_s > 0


def test_a_node_that_has_become_dearer_is_a_regression() -> None:
    old = stream_report({"off": 1.0, "on": 4.0})
    assert not any(change.worse for change in changes(old, old, 0.1))
    worse = changes(old, stream_report({"off": 1.0, "on": 3.0}), 0.1)
    assert {change.name.partition(" (")[0] for change in worse if change.worse} == {GAIN, OVER_FLOOR}


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    write_plot(stream_report({"off": 1.0, "on": 4.0, "on-interval": 2.0}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
