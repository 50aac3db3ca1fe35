"""Tests the report that users and machines read."""

from __future__ import annotations

import json

from pdserve.cli.doctor import render, to_json
from pdserve.doctor.examination import Examination
from pdserve.doctor.finding import Finding, Verdict, ok, problem, warning
from tests.doctor.test_probe import HERE

LONG = "transport a-very-long-name.of-some-host.example:8200"


def examination(*findings: Finding) -> Examination:
    return Examination("0.1.0", "node-7", "2026-01-02 03:04", findings, (HERE,))


def test_every_finding_is_there_with_what_to_do() -> None:
    text = render(
        examination(ok("cores", "2 of 2"), warning("MTU", "1500", "set it to 9000"), problem(LONG, "down", "raise it")),
        100,
    )
    lines = text.splitlines()
    assert lines[0] == "pdserve doctor 0.1.0 on node-7, 2026-01-02 03:04 UTC"
    assert lines[2].split() == ["ok", "cores", "2", "of", "2"]
    assert lines[4].strip() == "→ set it to 9000"
    assert lines[5] == f"problem  {LONG}"
    assert lines[-1] == "3 checks: 1 problem, 1 warning"


def test_long_texts_are_wrapped_below_each_other() -> None:
    text = render(examination(warning("x", "word " * 40, "do " * 60)), 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("word") == 40 and text.count("do ") + text.count("do\n") >= 60


def test_health_is_the_absence_of_problems() -> None:
    assert examination(ok("a", ""), warning("b", "", "")).healthy
    assert not examination(ok("a", ""), problem("b", "", "")).healthy


def test_json_has_all_of_it() -> None:
    found = json.loads(to_json(examination(problem("b", "seen", "do"))))
    assert found["findings"] == [{"check": "b", "verdict": Verdict.PROBLEM.value, "seen": "seen", "advice": "do"}]
    (probe,) = found["probes"]
    assert probe["measured"]["bytes_per_s"] == 7e9
    assert probe["yardstick"]["bytes_per_s"] == 1e10
    assert probe["measured"]["lanes"] == [{"transport": "posix", "device": "memory"}]
