"""``pdserve bench compare`` says whether a new report is worse than a committed one. It compares ratios alone, which
hold on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.bench.report import Better, Figure, Report, Row, Unit
from pdserve.errors import BenchError


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio of the old report and its value in the new report. ``new`` is None if the new report lacks it."""

    name: str
    old: float
    new: float | None
    worse: bool

    def __str__(self) -> str:
        now = "missing" if self.new is None else f"{self.new:.3g}"
        return f"{'WORSE' if self.worse else 'ok':5}  {self.name}: {self.old:.3g} → {now}"


def changes(old: Report, new: Report, tolerance: float) -> list[Change]:
    """Returns every ratio of ``old`` that has a better side, and whether it got worse by more than ``tolerance``.

    Raises BenchError if the reports are not of the same benchmark, or have no such ratio.
    """
    if old.benchmark != new.benchmark:
        raise BenchError(f"one report is of {old.benchmark!r}, the other of {new.benchmark!r}")
    found = {(_key(row), figure.name): figure for row in new.rows for figure in row.figures}
    result = [_change(row, figure, found.get((_key(row), figure.name)), tolerance) for row, figure in _ratios(old)]
    if not result:
        raise BenchError(f"the report of {old.benchmark!r} has no ratio that could be compared")
    return result


def _ratios(report: Report) -> Iterator[tuple[Row, Figure]]:
    for row in report.rows:
        for figure in row.figures:
            if figure.unit is Unit.RATIO and figure.better is not Better.NEITHER:
                yield row, figure


def _change(row: Row, old: Figure, new: Figure | None, tolerance: float) -> Change:
    where = ", ".join(f"{name} {value}" for name, value in row.at.items())
    name = f"{row.what} ({where}), {old.name}" if where else f"{row.what}, {old.name}"
    if new is None:
        return Change(name, old.value, None, worse=True)
    if old.better is Better.HIGHER:
        kept = new.value >= old.value * (1 - tolerance)
    else:
        kept = new.value <= old.value / (1 - tolerance)
    return Change(name, old.value, new.value, worse=not kept)


def _key(row: Row) -> tuple[str, tuple[tuple[str, int | str], ...]]:
    return row.what, tuple(row.at.items())
