"""The result of one check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    """It works, but slower or less reliably than it could."""
    PROBLEM = "problem"
    """It does not work."""
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    seen: str
    advice: str = ""
    """What the user should do; empty if there is nothing to do."""


def ok(check: str, seen: str) -> Finding:
    return Finding(check, Verdict.OK, seen)


def warning(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, Verdict.WARNING, seen, advice)


def problem(check: str, seen: str, advice: str) -> Finding:
    return Finding(check, Verdict.PROBLEM, seen, advice)


def not_applicable(check: str, seen: str) -> Finding:
    return Finding(check, Verdict.NOT_APPLICABLE, seen)
