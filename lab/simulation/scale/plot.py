"""Draws how many streams still stand still after a rack's loss, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from lab.simulation.scale.figures import Run


def write_plot(panels: Sequence[tuple[str, Sequence[tuple[str, Run]]]], measured: str, path: Path) -> None:
    """Writes an SVG with one panel for each title, and a line in it for each named run."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, (title, runs) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, run in runs:
            loss = run.report.loss
            if loss is not None and loss.streams:
                shares = [1.0, *(standing / loss.streams for standing in loss.standing)]
                axes.plot(range(len(shares)), shares, label=name, linewidth=1.2)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        axes.set_xlabel("seconds after the loss", fontsize=8)
    figure.suptitle(f"share of the lost nodes' streams that still stand still (runs that ended at {measured} UTC)")
    with mpl.rc_context({"svg.hashsalt": "scale", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
