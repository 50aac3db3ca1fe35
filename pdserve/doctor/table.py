"""Renders an examination as text for people, and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

import msgspec

from pdserve.doctor.examination import Examination
from pdserve.doctor.finding import Finding, Verdict

_GAP = "  "
_PLURAL = {Verdict.PROBLEM: "problems", Verdict.WARNING: "warnings"}


def render(examination: Examination, width: int) -> str:
    """Returns lines of at most ``width`` columns, as far as the words' lengths allow."""
    findings = examination.findings
    first = max(len(finding.verdict.value) for finding in findings)
    second = min(30, max(len(finding.check) for finding in findings))
    head = f"pdserve doctor {examination.version} on {examination.host}, {examination.examined} UTC"
    lines = [line for finding in findings for line in _lines(finding, first, second, width)]
    return "\n".join([head, "", *lines, "", _summary(findings)])


def _lines(finding: Finding, first: int, second: int, width: int) -> Iterator[str]:
    indent = " " * (first + second + 2 * len(_GAP))
    room = max(30, width - len(indent))
    check = f"{finding.verdict.value:{first}}{_GAP}{finding.check:{second}}{_GAP}"
    seen = textwrap.wrap(finding.seen, room, break_long_words=False) or [""]
    if len(finding.check) > second:
        yield check.rstrip()
        check = indent
    yield (check + seen[0]).rstrip()
    yield from (indent + line for line in seen[1:])
    yield from (
        indent + line
        for line in textwrap.wrap(
            finding.advice, room, initial_indent="→ ", subsequent_indent="  ", break_long_words=False
        )
    )


def _summary(findings: tuple[Finding, ...]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    bad = [f"{counts[verdict]} {name if counts[verdict] != 1 else name[:-1]}" for verdict, name in _PLURAL.items()]
    return f"{len(findings)} checks: {', '.join(bad)}"


def to_json(examination: Examination) -> bytes:
    """Returns the examination as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(examination), indent=1) + b"\n"
