"""Plots predictions: of the clusters around a choice, or beside what was measured over the rate."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdserve.bench.plan.figures import BESIDE, SYSTEM
from pdserve.bench.plan.forecast import CLUSTER, PREDICTED
from pdserve.bench.plot_style import page_style
from pdserve.bench.report import Report, Row
from pdserve.errors import BenchError

_COLOURS = ("#2f81f7", "#d1603d", "#2da44e")
_BESIDE = (("TTFT p90", "ms"), ("ITL p90", "ms"), ("output", "tok/s"))


def write_plot(report: Report, path: Path) -> None:
    """Writes the plot of a report of ``pdserve plan`` or ``pdserve bench plan``. Raises BenchError if it cannot."""
    with page_style():
        beside = report.rows_of(BESIDE)
        figure = _beside(beside) if beside else _clusters(report.rows_of(PREDICTED))
        try:
            figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        except OSError as exc:
            raise BenchError(f"cannot write {path}: {exc.strerror}") from exc


def _beside(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(_BESIDE))
    systems = list(dict.fromkeys(str(row.at[SYSTEM]) for row in rows))
    for axes, (name, unit) in zip(panels, _BESIDE, strict=True):
        for system, colour in zip(systems, _COLOURS, strict=False):
            own = [row for row in rows if row.at[SYSTEM] == system]
            rates = [row.figure("rate").value for row in own]
            for what, style in (("predicted", "o--"), ("measured", "s-")):
                values = [row.figure(f"{name} {what}").value for row in own]
                axes.plot(rates, values, style, color=colour, label=f"{system}, {what}", markersize=4)
        _finish(axes, f"{name}, {unit}", "requests a second")
    panels[0].legend(fontsize=8)
    return figure


def _clusters(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(10, 1.2 + 0.4 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    places = range(len(rows))
    for axes, name in zip(panels[:2], ("TTFT", "ITL"), strict=True):
        for share, colour in zip((50, 90, 99), _COLOURS, strict=True):
            values = [row.figure(f"{name} p{share}").value for row in rows]
            axes.plot(values, places, "o", color=colour, label=f"p{share}", markersize=5)
        axes.set_xscale("log")
        axes.legend(fontsize=8)
        _finish(axes, f"{name}, ms", "")
    panels[2].barh(places, [row.figure("goodput").value for row in rows], color=_COLOURS[0], height=0.5)
    _finish(panels[2], "goodput, requests a second", "")
    panels[0].set_yticks(list(places), [str(row.at[CLUSTER]) for row in rows])
    return figure


def _finish(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.grid(which="major")
