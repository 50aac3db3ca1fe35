"""Tests what the outcomes of others' tests mean, without running any."""

from __future__ import annotations

import pytest

from lab.compat.outcomes import ReportedOutcome, parse_outcomes
from lab.compat.program_runs import CHECKOUT
from lab.compat.results import Check, Outcome, ToolResult, details, table
from lab.compat.server_tests.judgement import Difference, Differences, judge, read_differences, stale
from lab.compat.server_tests.run import DIFFERENCES

NO_ADAPTERS = Differences((), (Difference(("*::test_chat[adapter*",), "there are no adapters"),))


def reported(test: str, outcome: Outcome, message: str = "") -> ReportedOutcome:
    return ReportedOutcome(test, outcome, message)


def test_a_failure_that_is_a_deliberate_difference_is_none() -> None:
    failed = [reported(f"a.py::test_chat[{name}]", Outcome.FAILED, "404") for name in ("adapter-1", "base")]
    assert judge(failed, NO_ADAPTERS) == (
        Check("a.py::test_chat[adapter-1]", Outcome.SKIPPED, "there are no adapters"),
        Check("a.py::test_chat[base]", Outcome.FAILED, "404"),
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_test_that_fails_at_its_end_has_failed(first: bool) -> None:
    both = [reported("a.py::test_x", Outcome.PASSED), reported("a.py::test_x", Outcome.FAILED, "left open")]
    assert judge(both if first else both[::-1], NO_ADAPTERS) == (Check("a.py::test_x", Outcome.FAILED, "left open"),)


def test_a_difference_that_passes_is_stale() -> None:
    found = [
        reported("a.py::test_chat[adapter]", Outcome.PASSED),
        reported("a.py::test_chat[adapter-2]", Outcome.FAILED),
        reported("a.py::test_chat[base]", Outcome.PASSED),
    ]
    assert stale(found, NO_ADAPTERS) == ("a.py::test_chat[adapter]",)


@pytest.mark.parametrize("project", ["vllm_tests", "sglang_tests"])
def test_every_deliberate_difference_has_a_reason(project: str) -> None:
    differences = read_differences(CHECKOUT / "lab" / "compat" / project / DIFFERENCES)
    assert all(entry.reason for entry in differences.not_run)
    assert all(entry.reason for entry in differences.difference)


def test_lines_of_a_program_become_a_row_and_reasons() -> None:
    lines = b'{"test":"chat","outcome":"passed","message":""}\n{"test":"tools","outcome":"failed","message":"400"}\n'
    checks = tuple(Check(found.test, found.outcome, found.message) for found in parse_outcomes(lines))
    result = ToolResult("a tool", "1.2", "chats", checks)
    assert table([result]).splitlines()[2] == "| a tool | 1.2 | chats | 1 of 2 pass |"
    assert details([result]) == "failed a tool tools: 400"
