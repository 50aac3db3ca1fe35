"""Writes the table of faults into reliability.md in docs: ``python -m tests.docs.reliability_page``.

The seconds are those of ``reliability.json`` beside the page, which ``python -m tests.faults.matrix`` measures.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from tests.docs.page_part import markdown_table, with_part
from tests.faults.matrix.figures import Figures, read_figures
from tests.faults.matrix.table import CELLS, TESTED, Cell, Fault, Phase, Promise, Victim

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reliability.md"
FIGURES = DOCS / "reliability.json"
BEGIN = "<!-- written by tests/docs/reliability_page.py from tests/faults/matrix/table.py and reliability.json -->"

_MARKS = {Promise.WHOLE: "whole", Promise.ASKS_AGAIN: "asks again", Promise.REFUSED: "refused"}


def page_with(text: str, figures: Figures) -> str:
    """Returns ``text`` with its tables replaced by those of the cells, with ``figures``."""
    return with_part(text, BEGIN, tables(figures))


def tables(figures: Figures) -> str:
    """Returns a table for each fault, and the reasons of the cells that have no promise."""
    reasons = list(dict.fromkeys(cell.why_not for cell in CELLS if cell.why_not))
    notes = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1)]
    counts = [len(figures.seconds.get(cell.name, [])) for cell in TESTED]
    measured = f"{sum(count > 0 for count in counts)} of the {len(counts)} cells with a promise were measured, "
    failed = sum(figures.failures.get(cell.name, 0) for cell in TESTED)
    measured += f"in {sum(counts)} runs." + (f" {failed} more failed." if failed else "")
    parts = [measured, *(_table(fault, figures, reasons) for fault in Fault)]
    return "\n\n".join([*parts, "Where there is no promise, the number is that of the reason:", "\n".join(notes)])


def _table(fault: Fault, figures: Figures, reasons: list[str]) -> str:
    cells = {(cell.victim, cell.phase): cell for cell in CELLS if cell.fault is fault}
    head = [f"**{fault.value}**", *(phase.value for phase in Phase)]
    rows = [[victim.value, *(_shown(cells[victim, phase], figures, reasons) for phase in Phase)] for victim in Victim]
    return markdown_table(head, rows)


def _shown(cell: Cell, figures: Figures, reasons: list[str]) -> str:
    if cell.promise is None:
        return f"– ({reasons.index(cell.why_not) + 1})"
    seconds = figures.seconds.get(cell.name, [])
    measured = f" {statistics.median(seconds):.2f}, {max(seconds):.2f}" if seconds else ""
    failures = figures.failures.get(cell.name, 0)
    failed = f", failed {failures} of {failures + len(seconds)}" if failures else ""
    return _MARKS[cell.promise] + measured + failed


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), read_figures(FIGURES)))
