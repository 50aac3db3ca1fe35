"""Tests reports as JSON, as tables and as a plot, and their comparison."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from benchmarks.batching import load_figures
from pdserve.bench.report import Better, Figure, Row, Unit, changes, number, read_report, render, table, to_json
from pdserve.bench.streamed_answer import summarise
from pdserve.errors import BenchError
from tests.bench.reports import batching_report, ratio, report, stream
from tests.cli.in_process import call


def test_json_and_back(tmp_path: Path) -> None:
    before = batching_report()
    file = tmp_path / "report.json"
    file.write_bytes(to_json(before))
    assert read_report(file) == before


def test_answers_of_one_token_have_no_tpot_and_still_make_a_report(tmp_path: Path) -> None:
    row = Row("load", {}, load_figures(summarise([stream(0.0, [1.0])])))
    with pytest.raises(KeyError):
        row.figure("TPOT mean")
    file = tmp_path / "report.json"
    file.write_bytes(to_json(report(row)))
    assert read_report(file).rows == (row,)


def test_what_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        read_report(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text('{"benchmark": 3}')
    with pytest.raises(BenchError, match="is not a report"):
        read_report(tmp_path / "other.json")


def test_a_table_has_every_row_and_column() -> None:
    text = render(batching_report())
    assert "a CPU, 2 cores, torch 2.13" in text
    assert "a note" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "static"] in [line[:2] for line in lines]
    assert ["4", "continuous"] in [line[:2] for line in lines]
    assert "TTFT mean, ms" in text
    assert "9,000" in text
    assert "TTFT mean, ×" in text


def test_columns_line_up_and_a_missing_figure_is_empty() -> None:
    first = Row("x", {"batch": 1}, (Figure("a", 1.0, Unit.MS), Figure("b", 2.0, Unit.MS)))
    second = Row("x", {"batch": 1000}, (Figure("b", 123.4, Unit.MS),))
    title, *lines = table("x", [first, second]).splitlines()
    assert title == "x"
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["1000", "123"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12345.6, "12,346"), (45.67, "45.7"), (3.456, "3.46"), (0.01234, "0.0123"), (0.0, "0"), (float("nan"), "nan")],
)
def test_numbers_are_as_exact_as_they_deserve(value: float, shown: str) -> None:
    assert number(Figure("x", value, Unit.MS)) == shown


@pytest.mark.parametrize(
    ("better", "new", "worse"),
    [
        (Better.HIGHER, 9.1, False),
        (Better.HIGHER, 8.9, True),
        (Better.HIGHER, 20.0, False),
        (Better.LOWER, 11.0, False),
        (Better.LOWER, 11.2, True),
        (Better.LOWER, 1.0, False),
        (Better.HIGHER, float("nan"), True),
        (Better.LOWER, float("nan"), True),
    ],
)
def test_a_ratio_may_be_worse_by_the_tolerance(better: Better, new: float, worse: bool) -> None:
    (change,) = changes(report(ratio(10.0, better)), report(ratio(new, better)), 0.1)
    assert change.worse is worse
    assert str(change).startswith("WORSE" if worse else "ok")


def test_each_ratio_is_compared_with_its_own_condition() -> None:
    old = report(ratio(10.0, concurrency=4), ratio(2.0, concurrency=8))
    new = report(ratio(2.0, concurrency=8), ratio(10.0, concurrency=4))
    assert [change.worse for change in changes(old, new, 0.1)] == [False, False]


def test_a_ratio_that_is_gone_is_worse() -> None:
    (change,) = changes(report(ratio(10.0)), report(ratio(10.0, concurrency=8)), 0.1)
    assert change.worse
    assert "missing" in str(change)


def test_times_are_not_compared() -> None:
    row = Row("x", {}, (Figure("step", 1.0, Unit.MS, Better.LOWER), Figure("share", 0.5, Unit.RATIO)))
    with pytest.raises(BenchError, match="no ratio"):
        changes(report(row), report(row), 0.1)


def test_reports_of_two_benchmarks_are_not_compared() -> None:
    with pytest.raises(BenchError, match="the other of 'engine'"):
        changes(report(ratio(1.0)), report(ratio(1.0), benchmark="engine"), 0.1)


@pytest.mark.integration
def test_the_command_tells_a_regression_by_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("old", 10.0), ("same", 9.8), ("worse", 5.0)):
        (tmp_path / f"{name}.json").write_bytes(to_json(report(ratio(value))))

    monkeypatch.chdir(tmp_path)

    def compare(new: str) -> subprocess.CompletedProcess[str]:
        return call("bench", "compare", "old.json", f"{new}.json")

    assert compare("same").returncode == 0
    done = compare("worse")
    assert done.returncode == 1
    assert "WORSE  ratios (concurrency 4), TTFT mean: 10 → 5" in done.stdout
    assert compare("nothing").returncode == 1


def test_a_report_is_plain_json() -> None:
    plain = msgspec.json.decode(to_json(report(ratio(2.5))))
    assert plain["rows"][0]["figures"][0] == {"name": "TTFT mean", "value": 2.5, "unit": "×", "better": "higher"}
