"""Plots ``benchmarks batching``: time to first token and throughput over concurrency, for both modes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.batching import MODE, RATIOS
from pdserve.bench.report import Report
from pdserve.config import Batching
from pdserve.errors import BenchError

_COLOURS = {Batching.STATIC: "#b04a4a", Batching.CONTINUOUS: "#2a6fb0"}


def write_plot(report: Report, path: Path) -> None:
    """Writes a PNG. Raises BenchError if ``path`` cannot be written."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    times, rates, ratios = figure.subplots(1, 3)
    _lines(times, report, "TTFT mean", "TTFT mean, ms")
    _logarithmic(times)
    _lines(rates, report, "output", "output tokens a second")
    _ratios(ratios, report)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as exc:
        raise BenchError(f"cannot write {path}: {exc.strerror}") from exc


def _lines(axes: Axes, report: Report, name: str, label: str) -> None:
    for mode, colour in _COLOURS.items():
        rows = [row for row in report.rows_of("batching") if row.at[MODE] == mode.value]
        axes.plot(
            [str(row.at["concurrency"]) for row in rows],
            [row.figure(name).value for row in rows],
            marker="o",
            color=colour,
            label=mode.value,
        )
    _finish(axes, label)


def _ratios(axes: Axes, report: Report) -> None:
    rows = report.rows_of(RATIOS)
    for name, style in (("TTFT mean", "o-"), ("output", "s--")):
        ticks = [str(row.at["concurrency"]) for row in rows]
        axes.plot(ticks, [row.figure(name).value for row in rows], style, color="#444444", label=name)
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    _logarithmic(axes)
    _finish(axes, "continuous : static, times better")


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log", subs=(1, 2, 5))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("{x:,g}")


def _finish(axes: Axes, label: str) -> None:
    axes.set_title(label, fontsize=10)
    axes.set_xlabel("concurrency")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
