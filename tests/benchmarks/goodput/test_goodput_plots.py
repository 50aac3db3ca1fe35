"""Tests what the plots of ``benchmarks goodput`` show."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.goodput.plots import (
    GOODPUT_PLOT,
    LABELS,
    LATENCY_PLOT,
    goodput_lines,
    latency_lines,
    lengths,
    shapes_of,
    write_plot,
)
from benchmarks.goodput.workload import Loop, Tightness
from pdserve.errors import BenchError
from tests.benchmarks.goodput.outcomes import SHAPE, goodput_report


def test_goodput_is_drawn_over_the_rate() -> None:
    lines = goodput_lines(goodput_report(), SHAPE, Tightness.TIGHT)
    assert {system: [(point.x, point.y) for point in points] for system, points in lines.items()} == {
        "mixed": [(1.5, 0.25)],
        "always": [(1.5, 0.0)],
        "auto": [(1.5, 0.75)],
    }


def test_latencies_are_drawn_by_the_number_of_clients() -> None:
    (point,) = latency_lines(goodput_report(), SHAPE)["mixed"]
    assert point.load == "4"
    assert point.x == pytest.approx(500)
    assert point.y == pytest.approx(50, rel=0.05)
    assert latency_lines(goodput_report(), "1/1") == {}
    assert shapes_of(goodput_report(), Loop.OPEN) == [SHAPE]


def test_both_plots_are_the_same_for_the_same_figures_and_name_every_system(tmp_path: Path) -> None:
    write_plot(goodput_report(), tmp_path)
    write_plot(goodput_report(), tmp_path / "again")
    for name in (GOODPUT_PLOT, LATENCY_PLOT):
        drawn = (tmp_path / name).read_text()
        assert drawn == (tmp_path / "again" / name).read_text()
        assert all(f">{LABELS[system]}</text>" in drawn for system in ("mixed", "always", "auto"))


def test_a_plot_names_the_model_the_machine_and_the_lengths(tmp_path: Path) -> None:
    write_plot(msgspec.structs.replace(goodput_report(), settings={"PDSERVE_MODEL": "demo"}), tmp_path)
    for name in (GOODPUT_PLOT, LATENCY_PLOT):
        drawn = (tmp_path / name).read_text()
        assert "SmolLM2-135M-Instruct (Q4_1) on " in drawn
        assert "prompts of 8 tokens, answers of 5" in drawn
    assert lengths("mix") == "prompts and answers of many lengths"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot write"):
        write_plot(goodput_report(), tmp_path / "no" / "where")
