"""Tests how a run's verdicts are shown, and that the committed page has the committed figures."""

from __future__ import annotations

import pytest

from lab.deploy_containers.page import PAGE, REPORT, written
from lab.deploy_containers.report import Findings, Report, Verdict, markdown, read_report, summary


def report(*verdicts: Verdict) -> Report:
    return Report("2026-01-01 00:00", 2, "a processor", "pdserve:1", 1_290_000_000, ["limits.cpu: 1"], list(verdicts))


def _fail(problem: str) -> None:
    raise AssertionError(problem)


def test_a_run_passes_if_it_has_scenarios_and_all_pass() -> None:
    good, bad = Verdict("drain", "It drains.", 1, [], []), Verdict("kills", "It dies.", 1, [], ["a request failed"])
    assert report(good).passed
    assert not report(good, bad).passed
    assert not report().passed


def test_figures_are_shown_in_a_table_by_what_they_are_about() -> None:
    found = Findings()
    found.figure("expressions", 39)
    found.figure("ready after", 3.456, "s", of="pdserve-proxy-0")
    found.figure("ready after", 20, "s", of="pdserve-decode-0")
    found.figure("failed", 0, of="pdserve-decode-0")
    found.check(True, "nothing")
    with found.checked():
        _fail("a stream ended early")
    shown = markdown(report(Verdict("start", "It starts.", 61.2, found.figures, found.problems)))
    assert "0 of 1 scenarios passed, in 1 minutes" in shown and "1.29 GB" in shown
    assert shown.endswith(
        "**Start**: **failed**, 61 s. It starts.\n\n* a stream ended early\n\nexpressions: 39.\n\n"
        "|  | ready after | failed |\n| --- | --- | --- |\n"
        "| pdserve-proxy-0 | 3.5 s |  |\n| pdserve-decode-0 | 20 s | 0 |"
    )


def test_a_summary_has_a_line_for_each_scenario() -> None:
    found = Findings()
    found.figure("ready after", 3.456, "s", of="pdserve-proxy-0")
    found.figure("ready after", 20, "s", of="pdserve-decode-0")
    found.figure("failed", 0, of="pdserve-decode-0")
    shown = summary(report(Verdict("start", "It starts.", 61.2, found.figures, ["a stream ended early"])))
    assert shown.endswith("\n| start | **failed**, 61 s | ready after 3.5 s to 20 s; failed 0 |")


def test_the_page_has_the_committed_figures() -> None:
    again = "python -m lab.deploy_containers.page writes them anew"
    found = read_report(REPORT)
    assert found.passed
    assert written(PAGE.read_text(), summary(found)) == PAGE.read_text(), again
    with pytest.raises(AssertionError, match="no place"):
        written("a page", "figures")
