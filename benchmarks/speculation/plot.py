"""Plots ``benchmarks speculation``: the time of a token over the share of drafts that were accepted, by request."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.speculation.benchmark import BY_STEP, KINDS, REQUESTS, TEMPERATURES, TPOT
from pdserve.bench.report import Report, Row
from pdserve.errors import BenchError

_COLOURS = {"repeating": "#2a6fb0", "free": "#b04a4a"}
_MARKS = dict(zip((f"{temperature:g}" for temperature in TEMPERATURES), "o^", strict=True))


def write_plot(report: Report, path: Path) -> None:
    """Writes a PNG. Raises BenchError if ``path`` cannot be written."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS:
        for temperature, mark in _MARKS.items():
            rows = [
                row
                for row in report.rows_of(REQUESTS)
                if (row.at["prompts"], row.at["temperature"]) == (kind, temperature) and _has_tpot(row)
            ]
            axes.plot(
                [_accepted_percent(row) for row in rows],
                [row.figure(TPOT).value for row in rows],
                mark,
                color=_COLOURS[kind],
                label=f"{kind}, temperature {temperature}",
            )
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("accepted drafts, in percent of the answer's tokens")
    axes.set_ylabel("TPOT with speculation : without")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as exc:
        raise BenchError(f"cannot write {path}: {exc.strerror}") from exc


def _has_tpot(row: Row) -> bool:
    """Returns whether a request has one: on a busy machine, a short answer may come in one piece."""
    return any(figure.name == TPOT for figure in row.figures)


def _accepted_percent(row: Row) -> float:
    by_step = row.figure(BY_STEP).value
    return 100 * by_step / (1 + by_step)
