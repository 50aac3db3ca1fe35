"""Writes the figures of soak.md in docs/benchmarks, and the plot beside it, from soak/report.json:
``python -m tests.docs.soak_page``.
"""

from __future__ import annotations

from pathlib import Path

from tests.docs.page_part import markdown_table, with_part
from tests.soak.plot import write_plot
from tests.soak.report import SoakReport, counted, read, show

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGE = DOCS / "soak.md"
FIGURES = DOCS / "soak" / "report.json"
PLOT = DOCS / "soak" / "plot.svg"
BEGIN = "<!-- written by tests/docs/soak_page.py from soak/report.json -->"


def figures(report: SoakReport) -> str:
    """Returns what a soak has shown as Markdown, with its plot."""
    machine = report.machine
    parts = [
        f"`python -m tests.soak --minutes {report.minutes:g} --seed {report.seed}` on {machine.cores} cores "
        f"({machine.cpu}), which ended at {machine.measured} UTC. [All figures]({FIGURES.relative_to(DOCS)}).",
        f"```\n{show(report.verdict)}\n```",
        f"![requests, faults, KV blocks, descriptors, threads and memory over time]({PLOT.relative_to(DOCS)})",
        f"Requests by what their clients did: {counted(report.manners)}.",
        markdown_table(
            ["fault", "of", "count", "whole again, p50", "at most"],
            (
                [row.fault, row.part, str(row.count), f"{row.recovery_p50_s:g} s", f"{row.recovery_max_s:g} s"]
                for row in report.faults
            ),
        ),
        markdown_table(
            ["rest at", "requests so far", "idle after", *_shown(report)],
            (
                [
                    f"{rest.at_s / 60:.0f} min",
                    str(rest.asked),
                    f"{rest.idle_after_s:g} s",
                    *(
                        f"{held.files}, {held.threads}, {held.own_mib:.0f}" if (held := rest.held.get(name)) else ""
                        for name in _shown(report)
                    ),
                ]
                for rest in report.rests
            ),
        ),
    ]
    return "\n\n".join(parts)


def _shown(report: SoakReport) -> list[str]:
    """Returns the processes that live from the first rest to the last one."""
    first, last = report.rests[0].held, report.rests[-1].held
    return [name for name, held in first.items() if name in last and last[name].pid == held.pid]


def written(text: str, part: str) -> str:
    """Returns the page's ``text`` with ``part`` in its place."""
    return with_part(text, BEGIN, part)


def main() -> None:
    report = read(FIGURES)
    write_plot(report, PLOT)
    PAGE.write_text(written(PAGE.read_text(), figures(report)))


if __name__ == "__main__":
    main()
