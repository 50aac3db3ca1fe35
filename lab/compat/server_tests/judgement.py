"""What the outcomes of others' tests mean: which failures are deliberate differences, and which are defects."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from lab.compat.outcomes import ReportedOutcome
from lab.compat.results import Check, Outcome


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tests that need not pass, by patterns of their names, and the reason."""

    tests: tuple[str, ...]
    reason: str

    def covers(self, test: str) -> bool:
        # Parameters of tests are in brackets, which fnmatch would take for a set of letters.
        return any(fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in self.tests)


class NotRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Modules whose tests are not run, by patterns of their paths, and the reason."""

    modules: tuple[str, ...]
    reason: str


class Differences(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of deliberate differences."""

    not_run: tuple[NotRun, ...]
    difference: tuple[Difference, ...]

    def reason(self, test: str) -> str | None:
        return next((found.reason for found in self.difference if found.covers(test)), None)


def read_differences(path: Path) -> Differences:
    return msgspec.toml.decode(path.read_bytes(), type=Differences)


def judge(outcomes: Sequence[ReportedOutcome], differences: Differences) -> tuple[Check, ...]:
    """Returns a check for each test. A failure that is a deliberate difference counts as skipped.

    A test may have several outcomes (its call and its end). It has failed if one of them has.
    """
    worst = (Outcome.PASSED, Outcome.SKIPPED, Outcome.FAILED)
    found: dict[str, ReportedOutcome] = {}
    for outcome in outcomes:
        known = found.get(outcome.test)
        if known is None or worst.index(outcome.outcome) > worst.index(known.outcome):
            found[outcome.test] = outcome
    return tuple(_judged(outcome, differences) for outcome in found.values())


def _judged(outcome: ReportedOutcome, differences: Differences) -> Check:
    if outcome.outcome is Outcome.FAILED and (reason := differences.reason(outcome.test)) is not None:
        return Check(outcome.test, Outcome.SKIPPED, reason)
    return Check(outcome.test, outcome.outcome, outcome.message)


def stale(outcomes: Sequence[ReportedOutcome], differences: Differences) -> tuple[str, ...]:
    """Returns the tests that pass although they are said to differ, so that the file stays true."""
    passed = {outcome.test for outcome in outcomes if outcome.outcome is Outcome.PASSED}
    passed -= {outcome.test for outcome in outcomes if outcome.outcome is not Outcome.PASSED}
    return tuple(sorted(test for test in passed if differences.reason(test) is not None))
