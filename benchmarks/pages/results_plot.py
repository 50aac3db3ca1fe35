"""Draws the table of results in docs/benchmarks.md: ``python -m benchmarks.pages.results_plot``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
PLOT = DOCS / "benchmarks" / "results.svg"
_ROW = re.compile(r"^\| (?P<what>[^|]+) \| [^|]+ \| [^|]+ \| (?P<times>[0-9.]+) \| \[", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    what: str
    times: float

    @property
    def shown(self) -> str:
        return f"{self.times:.2f} ×"


def results(page: str) -> list[Result]:
    """Returns the rows of the page's table of results."""
    return [Result(found["what"].replace("`", ""), float(found["times"])) for found in _ROW.finditer(page)]


def draw(rows: list[Result]) -> None:
    """Writes the plot: one bar a row, from 1 (as fast as the peer) outwards, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("svg")
    # Text remains text in the file, so that readers can search it. A fixed salt gives the same file for the same
    # figures.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "pdserve", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.36 * len(rows) + 1.1), layout="constrained")
    rows = rows[::-1]
    colours = ["#2a6fbb" if row.times >= 1 else "#b5651d" for row in rows]
    bars = axes.barh([row.what for row in rows], [row.times - 1 for row in rows], left=1, color=colours)
    axes.bar_label(bars, [row.shown for row in rows], padding=3)
    axes.set_xscale("log")
    axes.set_xlim(0.6, 12)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xticks([], minor=True)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times better than the peer")
    axes.set_title("SmolLM2-135M-Instruct in bf16 on 2 cores of an AMD EPYC (Zen 5)", fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    draw(results(PAGE.read_text()))
