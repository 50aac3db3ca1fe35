"""Writes the table of speculation in benchmarks.md: ``python -m benchmarks.pages.speculation_table``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from benchmarks.speculation.benchmark import BY_STEP, CPU, OUTPUT, RATIOS, TPOT
from pdserve.bench.report import Report, number, read_report

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "benchmarks" / "speculation.json"
BEGIN = "<!-- written by benchmarks/pages/speculation_table.py from speculation.json -->"

WANTED = {
    ("repeating", 1): "TPOT 0.6",
    ("repeating", 8): "output 1.15",
    ("free", 1): "TPOT 1.02",
    ("free", 8): "TPOT 1.02",
}
SHOWN = (TPOT, OUTPUT, CPU, "drafted", "accepted", BY_STEP)


def table(report: Report) -> str:
    """Returns the table as Markdown."""
    head = ["prompts", "temperature", "clients", "wanted", *SHOWN]
    rows = [
        [
            *(str(row.at[name]) for name in ("prompts", "temperature", "clients")),
            WANTED[str(row.at["prompts"]), int(row.at["clients"])],
            *(number(row.figure(name)) for name in SHOWN),
        ]
        for row in report.rows_of(RATIOS)
    ]
    return markdown_table(head, rows)


def page_with(text: str, report: Report) -> str:
    """Returns ``text`` with its table replaced by that of ``report``."""
    return with_part(text, BEGIN, table(report))


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), read_report(FIGURES)))
