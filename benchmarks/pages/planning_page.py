"""Writes table and plot of docs/planning.md from planning.json: ``python -m benchmarks.pages.planning_page``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages.page_part import command_of, markdown_table, with_interval, with_part
from benchmarks.plan.figures import (
    BESIDE,
    LEAST_PACE,
    MOST_PACE,
    PACE,
    RATE,
    SYSTEM,
    VERDICTS,
    WITHIN,
    by_the_profile_alone,
    ratio_name,
    verdict,
)
from benchmarks.plan.plot import write_plot
from benchmarks.settings import BenchPlanConfig
from pdserve.bench.report import Report, Row, number, read_report
from pdserve.settings.setting import settings_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURES, PLOT = DOCS / "planning.md", DOCS / "planning.json", DOCS / "planning.svg"
BEGIN = "<!-- written by benchmarks/pages/planning_page.py from planning.json -->"

_UNITS = {"output": "tok/s", "TTFT p90": "ms", "ITL p90": "ms"}


def figures(report: Report) -> str:
    """Returns what the report says as Markdown, with its plot."""
    machine = report.machine
    verdicts = [*(verdict(report.rows, name) for name in WITHIN), by_the_profile_alone(report.rows)]
    parts = [
        f"![TTFT, ITL and output over the rate, predicted and measured]({PLOT.name})",
        f"`{command(report)}` on {machine.cores} cores ({machine.cpu}), {machine.measured} UTC: "
        f"{'; '.join(note for note in report.notes if not note.startswith(VERDICTS))}. [All figures]({FIGURES.name}).",
        "\n".join(f"* {text}" for text in verdicts),
        _table(report.rows_of(BESIDE)),
    ]
    return "\n\n".join(parts)


def command(report: Report) -> str:
    """Returns the command that made a report, out of the settings that it holds."""
    settings = (
        setting for setting in settings_of(BenchPlanConfig) if setting.section == "plan" and setting.metavar != "FILE"
    )
    return command_of(report, "python -m benchmarks plan", settings)


def _table(rows: Sequence[Row]) -> str:
    head = ["system", "rate, req/s", "pace (least–most)"]
    for name, unit in _UNITS.items():
        head += [f"{name} predicted, {unit}", "measured", "ratio"]
    return markdown_table(head, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    pace, least, most = (number(row.figure(name)) for name in (PACE, LEAST_PACE, MOST_PACE))
    cells = [str(row.at[SYSTEM]), f"{number(row.figure('rate'))} ({row.at[RATE]} %)", f"{pace} ({least}–{most})"]
    for name in _UNITS:
        cells += [number(row.figure(f"{name} {what}")) for what in ("predicted", "measured")]
        cells.append(with_interval(row, ratio_name(name)))
    return cells


def written(text: str, part: str) -> str:
    """Returns the page's ``text`` with ``part`` in its place."""
    return with_part(text, BEGIN, part)


def main() -> None:
    report = read_report(FIGURES)
    write_plot(report, PLOT)
    PAGE.write_text(written(PAGE.read_text(), figures(report)))


if __name__ == "__main__":
    main()
