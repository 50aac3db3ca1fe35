"""Writes the table of faults into reliability.md in docs: ``python -m lab.fault_matrix.page``.

The seconds are those of ``reliability.json`` beside the page, which ``python -m lab.fault_matrix`` measures.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from lab.fault_matrix.figures import Figures, read_figures
from lab.fault_matrix.table import CELLS, TESTED, Cell, Fault, Phase, Promise, Victim

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reliability.md"
FIGURES = DOCS / "reliability.json"
BEGIN = "<!-- written by lab/fault_matrix/page.py from lab/fault_matrix/table.py and reliability.json -->"

_MARKS = {Promise.COMPLETE: "complete", Promise.ASKS_AGAIN: "asks again", Promise.REFUSED: "refused"}


def page_with(text: str, figures: Figures) -> str:
    """Returns ``text`` with its tables replaced by those of the cells, with ``figures``."""
    return with_part(text, BEGIN, tables(figures))


def tables(figures: Figures) -> str:
    """Returns a table for each fault, and the reasons of the cells that have no promise.

    A victim for which no phase has a promise, all for one reason, gets a sentence below the table in place of a row.
    """
    in_rows = [cell for fault in Fault for victim in _victims_with_row(fault) for cell in _row(fault, victim)]
    reasons = list(dict.fromkeys(cell.why_not for cell in in_rows if cell.why_not))
    notes = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1)]
    counts = [len(figures.seconds.get(cell.name, [])) for cell in TESTED]
    measured = f"{sum(count > 0 for count in counts)} of the {len(counts)} cells with a promise were measured, "
    failed = sum(figures.failures.get(cell.name, 0) for cell in TESTED)
    measured += f"in {sum(counts)} runs." + (f" {failed} more failed." if failed else "")
    parts = [measured, *(part for fault in Fault for part in (_table(fault, figures, reasons), *_without_row(fault)))]
    return "\n\n".join([*parts, "The number of a cell without a promise is that of its reason:", "\n".join(notes)])


def _row(fault: Fault, victim: Victim) -> list[Cell]:
    """Returns the cells of one victim, in the order of the phases."""
    cells = {cell.phase: cell for cell in CELLS if cell.fault is fault and cell.victim is victim}
    return [cells[phase] for phase in Phase]


def _only_reason(fault: Fault, victim: Victim) -> str:
    """Returns the reason why no phase has a promise, or nothing if there is a promise or another reason."""
    reasons = {cell.why_not for cell in _row(fault, victim)}
    return reasons.pop() if len(reasons) == 1 else ""


def _victims_with_row(fault: Fault) -> list[Victim]:
    return [victim for victim in Victim if not _only_reason(fault, victim)]


def _without_row(fault: Fault) -> list[str]:
    """Returns a sentence for each victim that has no row."""
    told = [(victim, _only_reason(fault, victim)) for victim in Victim]
    return [f'No row "{victim.value}": {reason}.' for victim, reason in told if reason]


def _table(fault: Fault, figures: Figures, reasons: list[str]) -> str:
    head = [f"**{fault.value}**", *(phase.value for phase in Phase)]
    rows = [
        [victim.value, *(_shown(cell, figures, reasons) for cell in _row(fault, victim))]
        for victim in _victims_with_row(fault)
    ]
    return markdown_table(head, rows)


def _shown(cell: Cell, figures: Figures, reasons: list[str]) -> str:
    if cell.promise is None:
        return f"– ({reasons.index(cell.why_not) + 1})"
    seconds = figures.seconds.get(cell.name, [])
    measured = f" {statistics.median(seconds):.2f}/{max(seconds):.2f}" if seconds else ""
    failures = figures.failures.get(cell.name, 0)
    failed = f", failed {failures} of {failures + len(seconds)}" if failures else ""
    return _MARKS[cell.promise] + measured + failed


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), read_figures(FIGURES)))
