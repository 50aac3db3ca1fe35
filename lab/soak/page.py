"""Writes the figures of the soak in benchmarks.md, and their plot, from docs/benchmarks/soak/report.json:
``python -m lab.soak.page``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from lab.soak.plot import write_plot
from lab.soak.report import SoakReport, read, show

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "benchmarks" / "soak" / "report.json"
PLOT = DOCS / "benchmarks" / "soak" / "plot.svg"
BEGIN = "<!-- written by lab/soak/page.py from soak/report.json -->"
_WORTH_A_ROW_S = 1.0


def figures(report: SoakReport) -> str:
    """Returns what a soak has shown as Markdown, with its plot."""
    machine = report.machine
    parts = [
        f"`python -m lab.soak --minutes {report.minutes:g} --seed {report.seed}` on {machine.cores} cores "
        f"({machine.cpu}), which ended at {machine.measured} UTC. [All figures]({FIGURES.relative_to(DOCS)}).",
        f"```\n{show(report.verdict)}\n```",
        f"![requests, faults, KV blocks, descriptors, threads and memory over time]({PLOT.relative_to(DOCS)})",
        _recoveries(report),
    ]
    return "\n\n".join(parts)


def _recoveries(report: SoakReport) -> str:
    """Returns how long the faults lasted after which something had to recover; the others took no time to speak of."""
    rows = [row for row in report.faults if row.recovery_max_s >= _WORTH_A_ROW_S]
    others = sum(row.count for row in report.faults) - sum(row.count for row in rows)
    table = markdown_table(
        ["fault", "of", "count", "whole again, p50 / at most"],
        ([row.fault, row.part, str(row.count), f"{row.recovery_p50_s:g} / {row.recovery_max_s:g} s"] for row in rows),
    )
    return f"{table}\n\nAfter the {others} other faults the cluster was whole within {_WORTH_A_ROW_S:g} s."


def written(text: str, part: str) -> str:
    """Returns the page's ``text`` with ``part`` in its place."""
    return with_part(text, BEGIN, part)


def main() -> None:
    report = read(FIGURES)
    write_plot(report, PLOT)
    PAGE.write_text(written(PAGE.read_text(), figures(report)))


if __name__ == "__main__":
    main()
