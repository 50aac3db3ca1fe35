"""Plots what was predicted of each system beside what was measured, over the rate of requests."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.plan.figures import BESIDE, SYSTEM
from pdserve.bench.plan.forecast_plot import COLOURS, label, page_style, save
from pdserve.bench.report import Report

_BESIDE = (("TTFT p90", "ms"), ("ITL p90", "ms"), ("output", "tok/s"))


def write_plot(report: Report, path: Path) -> None:
    """Writes the plot of a report of ``benchmarks plan``. Raises BenchError if it cannot."""
    rows = report.rows_of(BESIDE)
    systems = list(dict.fromkeys(str(row.at[SYSTEM]) for row in rows))
    with page_style():
        figure = Figure(figsize=(10, 3.4), layout="constrained")
        panels = figure.subplots(1, len(_BESIDE))
        for axes, (name, unit) in zip(panels, _BESIDE, strict=True):
            for system, colour in zip(systems, COLOURS, strict=False):
                own = [row for row in rows if row.at[SYSTEM] == system]
                rates = [row.figure("rate").value for row in own]
                for what, style in (("predicted", "o--"), ("measured", "s-")):
                    values = [row.figure(f"{name} {what}").value for row in own]
                    axes.plot(rates, values, style, color=colour, label=f"{system}, {what}", markersize=4)
            label(axes, f"{name}, {unit}", "requests a second")
        panels[0].legend(fontsize=8)
        save(figure, path)
