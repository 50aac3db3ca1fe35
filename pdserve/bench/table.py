"""A report as text: one table for each thing that was measured."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.report import Figure, Report, Row, Unit


def render(report: Report) -> str:
    """The whole report: machine, notes, tables."""
    machine = report.machine
    chip = f", {machine.chip}" if machine.chip else ""
    head = (
        f"{report.benchmark}: {machine.cpu}, {machine.cores} cores{chip}, torch {machine.torch}, {machine.measured} UTC"
    )
    kinds = dict.fromkeys((row.what, tuple(row.at)) for row in report.rows)
    tables = [
        table(what, [row for row in report.rows if row.what == what and tuple(row.at) == keys]) for what, keys in kinds
    ]
    return "\n\n".join(["\n".join([head, *report.notes]), *tables])


def table(title: str, rows: Sequence[Row]) -> str:
    """Rows under the same conditions' names; a figure that a row lacks is left empty."""
    names = {figure.name: _heading(figure) for row in rows for figure in row.figures}
    header = [*rows[0].at, *names.values()]
    lines = [[*(str(value) for value in row.at.values()), *(_cell(row, name) for name in names)] for row in rows]
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    return "\n".join(
        [
            title,
            *(
                "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
                for line in [header, *lines]
            ),
        ]
    )


def _heading(figure: Figure) -> str:
    return f"{figure.name}, {figure.unit.value}" if figure.unit.value else figure.name


def _cell(row: Row, name: str) -> str:
    found = [figure for figure in row.figures if figure.name == name]
    return number(found[0]) if found else ""


def number(figure: Figure) -> str:
    """Three significant digits, or all that stand before the point."""
    value = figure.value
    if figure.unit is Unit.COUNT:
        return f"{value:.0f}"
    size = abs(value)
    places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:,.{places}f}"
