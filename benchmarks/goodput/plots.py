"""Plots a report of ``benchmarks goodput``.

``goodput.svg`` has goodput over the rate of an open loop, ``goodput-latency.svg`` TTFT against ITL for each number of
clients of a closed loop. Both can be read on a light and on a dark page: nothing is filled, and the ink is grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.goodput.figures import ALWAYS, AUTO, MIXED, RATE, SYSTEM, goodput_name
from benchmarks.goodput.workload import TOLD, Loop, Tightness
from pdserve.bench.plan.forecast_plot import INK, page_style
from pdserve.bench.report import Report, Row
from pdserve.errors import BenchError

GOODPUT_PLOT, LATENCY_PLOT = "goodput.svg", "goodput-latency.svg"
LABELS = {
    MIXED: "pdserve, one node",
    AUTO: "pdserve, prefill + decode",
    ALWAYS: "pdserve, prefill + decode (always)",
}
"""What the plots call pdserve's systems. Another server has the name that ``--add`` gives it."""
_DEMO = "SmolLM2-135M-Instruct (Q4_1)"
_COLOURS = {AUTO: "#2f81f7", MIXED: "#d1603d", ALWAYS: "#2da44e"}
_OTHER_COLOURS = ("#a371f7", "#c69026", "#db61a2", "#39a0a8")


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """One system at one load."""

    x: float
    y: float
    load: str
    """What is written beside the point; empty for nothing."""


Lines = Mapping[str, Sequence[PlotPoint]]
"""The points of each system, in the order of the load."""


def goodput_lines(report: Report, shape: str, tightness: Tightness) -> Lines:
    """Returns goodput over the rate of the requests, both a second. Only what was told no other target counts."""
    name = goodput_name(tightness)
    return {
        system: [
            PlotPoint(row.figure(RATE).value, row.figure(name).value, "")
            for row in rows
            if row.at.get(TOLD, tightness.value) == tightness.value
        ]
        for system, rows in _rows_by_system(report, Loop.OPEN, shape).items()
    }


def latency_lines(report: Report, shape: str) -> Lines:
    """Returns ITL p99 over TTFT p50, both in ms. A load without an answer has no point.

    The points of each target that requests name are after each other.
    """
    return {
        system: [
            PlotPoint(row.figure("TTFT p50").value, row.figure("ITL p99").value, _load(row))
            for row in rows
            if {"TTFT p50", "ITL p99"} <= {figure.name for figure in row.figures}
        ]
        for system, rows in _rows_by_system(report, Loop.CLOSED, shape).items()
    }


def _load(row: Row) -> str:
    told = row.at.get(TOLD)
    return str(row.at["clients"]) if told is None else f"{row.at['clients']} {told}"


def shapes_of(report: Report, loop: Loop) -> list[str]:
    return list(dict.fromkeys(str(row.at["shape"]) for row in report.rows_of(loop.value)))


def _rows_by_system(report: Report, loop: Loop, shape: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in report.rows_of(loop.value):
        if row.at["shape"] == shape:
            found.setdefault(str(row.at[SYSTEM]), []).append(row)
    return found


def write_plot(report: Report, folder: Path) -> None:
    """Writes both plots into ``folder``, which is made if it is not there. Raises BenchError if that cannot be."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as exc:
        raise BenchError(f"cannot write {folder}: {exc.strerror}") from exc
    with page_style():
        title = f"python -m benchmarks goodput, {report.machine.measured} UTC"
        _save(_goodput_figure(report), folder / GOODPUT_PLOT, title)
        _save(_latency_figure(report), folder / LATENCY_PLOT, title)


def _goodput_figure(report: Report) -> Figure:
    shapes = shapes_of(report, Loop.OPEN)
    figure = Figure(figsize=(9, 3.6 * max(1, len(shapes))), layout="constrained")
    panels = figure.subplots(max(1, len(shapes)), len(Tightness), squeeze=False)
    for shape, line in zip(shapes, panels, strict=False):
        for tightness, axes in zip(Tightness, line, strict=True):
            lines = goodput_lines(report, shape, tightness)
            _draw(axes, lines)
            highest = max((point.x for points in lines.values() for point in points), default=1.0)
            axes.plot([0, highest], [0, highest], color=INK, linewidth=0.8, linestyle=":")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            _finish(
                axes,
                f"{lengths(shape)}\n{tightness.value} target for pauses between tokens",
                "requests a second",
                "good answers a second",
            )
    _entitle(figure, report)
    return figure


def _latency_figure(report: Report) -> Figure:
    shapes = shapes_of(report, Loop.CLOSED)
    columns = min(2, max(1, len(shapes)))
    lines_of_panels = max(1, -(-len(shapes) // columns))
    figure = Figure(figsize=(5.0 * columns if columns > 1 else 7.5, 4.4 * lines_of_panels), layout="constrained")
    panels = figure.subplots(lines_of_panels, columns, squeeze=False).flat
    for axes in list(panels)[len(shapes) :]:
        axes.set_visible(False)
    for shape, axes in zip(shapes, figure.axes, strict=False):
        _draw(axes, latency_lines(report, shape))
        axes.set_xscale("log", subs=(2, 5))
        axes.set_yscale("log", subs=(2, 5))
        for scale in (axes.xaxis, axes.yaxis):
            scale.set_major_formatter("{x:,g}")
            scale.set_minor_formatter("{x:,g}")
        _finish(
            axes,
            f"{lengths(shape)}\nthe number at a point is that of the clients; lower left is better",
            "time to first token, median, ms",
            "pause between tokens, p99, ms",
        )
    _entitle(figure, report)
    return figure


def lengths(shape: str) -> str:
    """Returns what a shape of requests is, in words."""
    prompt, _, answer = shape.partition("/")
    return f"prompts of {prompt} tokens, answers of {answer}" if answer else "prompts and answers of many lengths"


def _entitle(figure: Figure, report: Report) -> None:
    """Writes the model and the machine over a figure, and the systems' names below it."""
    labels = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    # matplotlib gives a line without a label one that begins with an underscore.
    shown = {label: line for label, line in labels.items() if not label.startswith("_")}
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3, fontsize=9)
    model = report.settings.get("PDSERVE_MODEL", "")
    named = _DEMO if model == "demo" else model
    machine = f"{report.machine.cores} cores ({report.machine.cpu.replace('(R)', '')})"
    figure.suptitle(f"{named} on {machine}" if named else machine, color=INK, fontsize=10)


def _draw(axes: Axes, lines: Lines) -> None:
    others = iter(_OTHER_COLOURS)
    for system, points in lines.items():
        colour = _COLOURS.get(system) or next(others, INK)
        axes.plot(
            [point.x for point in points],
            [point.y for point in points],
            "o-",
            color=colour,
            markersize=4,
            label=LABELS.get(system, system),
        )
        for point in points:
            axes.annotate(point.load, (point.x, point.y), (4, 4), textcoords="offset points", color=colour, fontsize=9)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(which="both")


def _save(figure: Figure, path: Path, title: str) -> None:
    try:
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    except OSError as exc:
        raise BenchError(f"cannot write {path}: {exc.strerror}") from exc
