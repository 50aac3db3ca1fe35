"""What the compatibility run found, as one table."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Outcome(enum.Enum):
    """The end of one check of another project's program or test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It needs what the cluster does not have, for the reason that stands beside it."""


@dataclass(frozen=True)
class Check:
    """One check, by its name, and why it failed or was skipped."""

    name: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class ToolResult:
    """All checks that one tool made of the cluster."""

    tool: str
    version: str
    what: str
    checks: tuple[Check, ...]

    def of(self, outcome: Outcome) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome is outcome)

    @property
    def verdict(self) -> str:
        passed, failed, skipped = (len(self.of(outcome)) for outcome in Outcome)
        said = f"{passed} of {passed + failed} pass" if failed else f"all {passed} pass"
        return said + (f"; {skipped} differ or do not apply" if skipped else "")


def table(results: Sequence[ToolResult]) -> str:
    """Returns the results as a table of Markdown."""
    rows = [f"| {result.tool} | {result.version} | {result.what} | {result.verdict} |" for result in results]
    return "\n".join(["| tool | version | what was run | result |", "|---|---|---|---|", *rows]) + "\n"


def details(results: Sequence[ToolResult]) -> str:
    """Returns a line for each check that did not pass."""
    lines = []
    for result in results:
        for outcome in (Outcome.FAILED, Outcome.SKIPPED):
            lines += [f"{outcome.value} {result.tool} {check.name}: {check.reason}" for check in result.of(outcome)]
    return "\n".join(lines)
