"""The part of a page that a program writes, between a line that names the program and ``END``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.bootstrap import HIGH, LOW
from pdserve.bench.report import Report, Row, number
from pdserve.settings.setting import Setting, to_text

END = "<!-- to here -->"


def with_part(text: str, begin: str, part: str) -> str:
    """Returns a page's ``text`` with ``part`` between ``begin`` and ``END``."""
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    assert found and end, f"the page has no place between {begin} and {END}"
    return f"{before}{begin}\n\n{part}\n\n{END}{after}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def with_interval(row: Row, name: str) -> str:
    """Returns a figure, with the ends of its interval behind it if it has one; nothing if the row lacks it."""
    found = {figure.name: number(figure) for figure in row.figures}
    if name + LOW in found:
        return f"{found[name]} ({found[name + LOW]}–{found.get(name + HIGH, '∞')})"
    return found.get(name, "")


def command_of(report: Report, program: str, settings: Iterable[Setting]) -> str:
    """Returns the command that made a report, with those of ``settings`` that had another value than the default."""
    flags = [
        f"--{setting.flag} {report.settings[setting.env]}"
        for setting in settings
        if report.settings.get(setting.env, to_text(setting.default)) != to_text(setting.default)
    ]
    return " ".join([program, *flags])
