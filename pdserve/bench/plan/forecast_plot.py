"""Plots predictions of the clusters around a choice, in the style of all plots on the pages of the docs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdserve.bench.plan.rows import CLUSTER, PREDICTED
from pdserve.bench.report import Report
from pdserve.errors import BenchError

INK = "#7d8590"
"""Fit for a light and for a dark ground."""
COLOURS = ("#2f81f7", "#d1603d", "#2da44e")


def write_plot(report: Report, path: Path) -> None:
    """Writes the plot of a report of ``pdserve plan``. Raises BenchError if ``path`` cannot be written."""
    rows = report.rows_of(PREDICTED)
    with page_style():
        figure = Figure(figsize=(10, 1.2 + 0.4 * len(rows)), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        places = range(len(rows))
        for axes, name in zip(panels[:2], ("TTFT", "ITL"), strict=True):
            for share, colour in zip((50, 90, 99), COLOURS, strict=True):
                values = [row.figure(f"{name} p{share}").value for row in rows]
                axes.plot(values, places, "o", color=colour, label=f"p{share}", markersize=5)
            axes.set_xscale("log")
            axes.legend(fontsize=8)
            label(axes, f"{name}, ms", "")
        panels[2].barh(places, [row.figure("goodput").value for row in rows], color=COLOURS[0], height=0.5)
        label(panels[2], "goodput, requests a second", "")
        panels[0].set_yticks(list(places), [str(row.at[CLUSTER]) for row in rows])
        save(figure, path)


def page_style() -> AbstractContextManager[None]:
    """Returns a context in which figures have the style of the pages."""
    return matplotlib.rc_context(
        {
            # Text remains text in the file, so that readers can search it. A fixed salt gives the same file for the
            # same figures.
            "svg.fonttype": "none",
            "svg.hashsalt": "pdserve",
            "font.size": 10,
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.facecolor": "none",
            "xtick.color": INK,
            "ytick.color": INK,
            "grid.color": INK,
            "grid.alpha": 0.25,
            "legend.frameon": False,
        }
    )


def label(axes: Axes, title: str, x_label: str) -> None:
    """Gives one panel of a figure its title, the label of its x axis, and its grid."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.grid(which="major")


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as SVG. Raises BenchError."""
    try:
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
    except OSError as exc:
        raise BenchError(f"cannot write {path}: {exc.strerror}") from exc
