"""``benchmarks families`` as a person runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families import SHAPES
from pdserve.bench.report import read_report
from tests.benchmarks.studies import run_study

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


def test_each_step_is_timed_with_the_recipe_and_in_transformers_code(tmp_path: Path) -> None:
    flags = ("--layers", "1", "--batches", "1,2", "--context", "20", "--chunk", "16", "--rounds", "1")
    run_study("families", *flags, "--json", "families.json", folder=tmp_path, timeout_s=240)
    report = read_report(tmp_path / "families.json")
    for family in SHAPES:
        rows = report.rows_of(family)
        assert [row.at["step"] for row in rows] == ["decode of 1", "decode of 2", "prefill of 16"]
        for row in rows:
            ratio = row.figure("transformers").value / row.figure("recipe").value
            assert row.figure("times better").value == pytest.approx(ratio)
