"""Runs ``pdserve bench batching`` as a user does: two real nodes give the same answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.bench.report import read_report
from tests.processes import clean_environ

pytestmark = pytest.mark.integration

SHORT = ("--max-prompt-tokens", "32", "--min-output-tokens", "2", "--max-output-tokens", "6", "--requests", "4")


def test_both_modes_give_the_same_tokens_in_one_table_and_one_plot(tiny_model: Path, tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    node = ("--model", str(tiny_model), "--dtype", "fp32", "--kv-cache-mib", "64", "--cores", core)
    files = ("--json", "figures.json", "--plot", "plot.png")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdserve", "bench", "batching", "--concurrency", "1,3", *SHORT, *node, *files],
        cwd=tmp_path,
        env=clean_environ(XDG_STATE_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "0 of 16 greedy answers (fp32) differ between the modes" in done.stdout
    report = read_report(tmp_path / "figures.json")
    runs = [(row.at["concurrency"], row.at["mode"]) for row in report.rows_of("batching")]
    assert runs == [(1, "static"), (1, "continuous"), (3, "static"), (3, "continuous")]
    assert [row.at["concurrency"] for row in report.rows_of("continuous against static")] == [1, 3]
    assert all(row.figure("failed").value == 0 for row in report.rows_of("batching"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
