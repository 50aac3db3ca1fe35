"""Draws a soak: requests, faults, KV blocks, descriptors, threads and memory over time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.soak.report import Series, SoakReport

_COLOURS = {
    "proxy-0": "#7a3fa0",
    "proxy-1": "#c49ae0",
    "prefill-0": "#2a6fb0",
    "prefill-1": "#8fc1ec",
    "decode-0": "#b04a4a",
    "decode-1": "#eaa0a0",
}
_STYLES = {"": "-", "engine": "--"}


def write_plot(report: SoakReport, path: Path) -> None:
    """Writes an SVG."""
    figure = Figure(figsize=(10, 13), layout="constrained")
    panels = figure.subplots(6, 1, sharex=True)
    minutes = [at / 60 for at in report.at_s]
    _requests(panels[0], report, minutes)
    _blocks(panels[1], report, minutes)
    _processes(panels[2], report, minutes, "open descriptors", lambda series: series.files)
    _processes(panels[3], report, minutes, "threads", lambda series: series.threads)
    _processes(panels[4], report, minutes, "allocated memory, MiB", lambda series: series.own_mib)
    _processes(panels[5], report, minutes, "PSS, MiB", lambda series: series.pss_mib)
    panels[-1].set_xlabel(f"minutes, of a run that ended at {report.machine.measured} UTC")
    handles, labels = panels[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7)
    with mpl.rc_context({"svg.hashsalt": "soak", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _requests(axes: Axes, report: SoakReport, minutes: Sequence[float]) -> None:
    pairs = list(itertools.pairwise(zip(report.at_s, report.asked, strict=True)))
    rates = [(asked - before) / (at - then) for (then, before), (at, asked) in pairs]
    axes.plot(minutes[1:], rates, color="#444444", linewidth=1, label="requests a second")
    for server, colour in _COLOURS.items():
        times = [at / 60 for at, name, _ in report.fault_times if name == server]
        axes.plot(times, [0.0] * len(times), "|", color=colour, markersize=8)
    wrong = [(found.at_s / 60, 0.0) for found in report.findings]
    axes.plot([at for at, _ in wrong], [y for _, y in wrong], "rx", label="wrong or lost")
    _finish(axes, "requests a second; a tick is a fault, in the colour of its server")


def _blocks(axes: Axes, report: SoakReport, minutes: Sequence[float]) -> None:
    for name, series in report.servers.items():
        if not name.startswith("proxy"):
            axes.plot(minutes, _numbers(series.blocks_used), color=_COLOURS[name], linewidth=0.8)
    quarantined = [
        sum(series.blocks_quarantined[at] or 0 for series in report.servers.values()) for at in range(len(minutes))
    ]
    axes.plot(minutes, quarantined, ".", color="#222222", markersize=3)
    _finish(axes, "share of KV blocks in use; points: blocks in quarantine")


def _processes(
    axes: Axes,
    report: SoakReport,
    minutes: Sequence[float],
    title: str,
    values: Callable[[Series], Sequence[float | None]],
) -> None:
    for name, series in report.processes.items():
        server, _, purpose = name.partition(" ")
        if purpose in _STYLES:
            axes.plot(
                minutes,
                _lives(series, values(series)),
                _STYLES[purpose],
                color=_COLOURS[server],
                linewidth=1,
                label=name,
            )
    axes.set_ylim(bottom=0)
    _finish(axes, title)


def _lives(series: Series, values: Sequence[float | None]) -> list[float]:
    """Returns the values with a gap where one process ended and the next one began."""
    numbers = _numbers(values)
    for at, (before, pid) in enumerate(itertools.pairwise(series.pid), 1):
        if before != pid:
            numbers[at] = float("nan")
    return numbers


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
