"""The options of the plugins of pytest that run others' tests, and the file in which they say how each test ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LONGEST_MESSAGE = 2000


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("compat")
    group.addoption("--server-url", required=True, help="the server that the tests ask, without /v1")
    group.addoption("--server-model", required=True, help="the name of its model")
    group.addoption("--tokenizer", required=True, type=Path, help="the folder with its tokeniser")
    group.addoption("--outcomes", required=True, type=Path, help="this file gets one line of JSON for each test")


class OutcomesFile:
    """Writes each test's outcome as soon as it is known, so that a run which is cut short leaves what it has found.

    Where several processes run tests, the one that controls them hears of the end of each test, and each of the others
    of the modules that it cannot load.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("--outcomes")
        self._controls = not hasattr(config, "workerinput")
        if self._controls:
            self._path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._controls and (report.when == "call" or not report.passed):
            self._add(report.nodeid, report.outcome, _message(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._add(report.nodeid, report.outcome, _message(report))

    def _add(self, test: str, outcome: str, message: str) -> None:
        with self._path.open("a") as lines:
            lines.write(json.dumps({"test": test, "outcome": outcome, "message": message}) + "\n")


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, (tuple, list)):
        return str(report.longrepr[2])[-LONGEST_MESSAGE:]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:LONGEST_MESSAGE]
