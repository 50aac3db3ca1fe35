"""Tests ``benchmarks batching``: two real nodes give the same answers; its ratios and its plot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.batching_plot import write_plot
from pdserve.bench.report import read_report
from pdserve.errors import BenchError
from tests.bench.reports import batching_report
from tests.benchmarks.studies import run_study

SHORT = ("--max-prompt-tokens", "32", "--min-output-tokens", "2", "--max-output-tokens", "6", "--requests", "4")


# tests/engine/scheduling shows in `make test` what each mode does, and tests/cluster/test_same_tokens.py that a token
# depends on no batch.
@pytest.mark.integration
@pytest.mark.nightly
def test_both_modes_give_the_same_tokens_in_one_table_and_one_plot(tiny_model: Path, tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    node = ("--model", str(tiny_model), "--prompt-vocab", "400", "--dtype", "fp32", "--kv-cache-mib", "64")
    files = ("--cores", core, "--json", "figures.json", "--plot", "plot.png")
    done = run_study("batching", "--concurrency", "1,3", *SHORT, *node, *files, folder=tmp_path, timeout_s=240)
    assert "0 of 16 greedy answers (fp32) differ between the modes" in done.stdout
    report = read_report(tmp_path / "figures.json")
    runs = [(row.at["concurrency"], row.at["mode"]) for row in report.rows_of("batching")]
    assert runs == [(1, "static"), (1, "continuous"), (3, "static"), (3, "continuous")]
    assert [row.at["concurrency"] for row in report.rows_of("continuous against static")] == [1, 3]
    assert all(row.figure("failed").value == 0 for row in report.rows_of("batching"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_of_the_two_modes_and_answers_that_differ() -> None:
    row = batching_report().rows_of("continuous against static")[0]
    assert row.figure("TTFT mean").value == pytest.approx(9.0)
    assert row.figure("output").value == pytest.approx(11 / 3)
    assert row.figure("differing answers").value == 1


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    write_plot(batching_report(), file)
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BenchError, match="cannot write"):
        write_plot(batching_report(), tmp_path / "nowhere" / "plot.png")
