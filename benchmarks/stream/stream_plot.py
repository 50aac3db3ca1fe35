"""Plots ``benchmarks stream``: tokens a second, and the cost of one for the node and the proxy, over streams."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.stream.figures import NODE_COST, OUTPUT, PROXY_COST, Regime
from pdserve.bench.report import Report
from pdserve.errors import BenchError


def write_plot(report: Report, path: Path) -> None:
    """Writes a PNG. Raises BenchError if ``path`` cannot be written."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    rates, nodes, proxies = figure.subplots(1, 3)
    _lines(rates, report, Regime.SATURATED, OUTPUT, "tokens a second, saturated")
    _lines(nodes, report, Regime.PACED, NODE_COST, "node: CPU µs a token, paced")
    _lines(proxies, report, Regime.PACED, PROXY_COST, "proxy: CPU µs a token, paced")
    rates.legend(fontsize=7)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as exc:
        raise BenchError(f"cannot write {path}: {exc.strerror}") from exc


def _lines(axes: Axes, report: Report, regime: Regime, name: str, label: str) -> None:
    rows = report.rows_of(regime.value)
    for index, variant in enumerate(dict.fromkeys(row.at["variant"] for row in rows)):
        own = [row for row in rows if row.at["variant"] == variant]
        axes.plot(
            [str(row.at["streams"]) for row in own],
            [row.figure(name).value for row in own],
            # There are only ten colours, so the variants that leave a part out are dashed.
            "o--" if str(variant).startswith("on-") else "o-",
            color=f"C{index % 10}",
            label=str(variant),
        )
    axes.set_ylim(bottom=0)
    axes.set_title(label, fontsize=10)
    axes.set_xlabel("streams")
    axes.grid(alpha=0.3)
