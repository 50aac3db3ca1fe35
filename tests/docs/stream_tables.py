"""Writes the tables of streaming.md in docs/benchmarks from stream.json: ``python -m tests.docs.stream_tables``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdserve.bench.report import Report, Row, read_report
from pdserve.bench.stream.figures import NODE_COST, OUTPUT, PROXY_COST, TTFT_MEAN, TTFT_P50, Regime
from tests.docs.page_part import markdown_table, with_part

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGE = DOCS / "streaming.md"
FIGURES = DOCS / "stream.json"
BEGIN = "<!-- written by tests/docs/stream_tables.py from stream.json -->"

STREAMS = 1024
VARIANTS = {
    "off": "all off",
    "dispatch": "batched dispatch alone",
    "notify+fast-path": "batch notify and fast path alone",
    "interval": "`--stream-interval` 10 alone",
    "on-interval": "all but the interval: the default",
    "on": "all on",
    "on-dispatch": "all on but batched dispatch",
    "on-notify+fast-path": "all on but batch notify and fast path",
}
ASKED = [
    ("dispatch", TTFT_MEAN, "batched dispatch, TTFT mean", "1.69"),
    ("dispatch", TTFT_P50, "batched dispatch, TTFT median", "3.23"),
    ("notify+fast-path", OUTPUT, "batch notify and fast path, tok/s", "1.20"),
    ("interval", OUTPUT, "`--stream-interval` 10, tok/s", "1.57"),
]
SHOWN = ["off", "on-interval", "on"]


class Runs:
    """The report's rows, by regime, number of streams and variant."""

    def __init__(self, report: Report) -> None:
        self._rows = {
            (regime, row.at["streams"], row.at["variant"]): row
            for regime in Regime
            for row in report.rows_of(regime.value)
        }
        self.streams: Sequence[int] = sorted({int(streams) for _, streams, _ in self._rows})

    def row(self, regime: Regime, variant: str, streams: int = STREAMS) -> Row:
        return self._rows[regime, streams, variant]

    def gain(self, regime: Regime, part: str, others: str, figure: str) -> str:
        """Returns how many times better the figure is with the part than without it."""
        without, having = ("off", part) if others == "off" else (f"on-{part}", "on")
        old, new = (self.row(regime, variant).figure(figure).value for variant in (without, having))
        return f"{new / old if figure == OUTPUT else old / new:.2f}"

    def cost(self, regime: Regime, variant: str, streams: int = STREAMS) -> str:
        """Returns the CPU time of a token in the node and in the proxy."""
        row = self.row(regime, variant, streams)
        return f"{row.figure(NODE_COST).value:.1f} + {row.figure(PROXY_COST).value:.1f}"


def tables(report: Report) -> str:
    """Returns the tables as Markdown."""
    runs = Runs(report)
    return "\n\n".join([_variants(runs), _asked(runs), _streams(runs)])


def page_with(text: str, report: Report) -> str:
    """Returns ``text`` with its tables replaced by those of ``report``."""
    return with_part(text, BEGIN, tables(report))


def _variants(runs: Runs) -> str:
    rows = []
    for variant, name in VARIANTS.items():
        row = runs.row(Regime.SATURATED, variant)
        ttft = f"{row.figure(TTFT_MEAN).value:,.0f}, {row.figure(TTFT_P50).value:,.0f}"
        costs = (f"{row.figure(cost).value:.1f}" for cost in (NODE_COST, PROXY_COST))
        rows.append([name, f"{row.figure(OUTPUT).value:,.0f}", ttft, *costs])
    head = [
        f"saturated, {STREAMS:,} streams",
        "tok/s",
        "TTFT mean, median, ms",
        "node, CPU µs a token",
        "proxy, CPU µs a token",
    ]
    return markdown_table(head, rows)


def _asked(runs: Runs) -> str:
    rows = []
    for part, figure, name, asked in ASKED:
        cells = [name, f"{asked} ×"]
        for others, without, having in (("off", "off", part), ("on", f"on-{part}", "on")):
            gain = f"{runs.gain(Regime.SATURATED, part, others, figure)} ×"
            if figure != OUTPUT:
                gain += f" (paced {runs.gain(Regime.PACED, part, others, figure)})"
            cells += [gain, f"{runs.cost(Regime.SATURATED, without)} → {runs.cost(Regime.SATURATED, having)}"]
        rows.append(cells)
    cost = "CPU µs a token without it → with it, node + proxy"
    return markdown_table(
        [f"saturated, {STREAMS:,} streams", "asked for", "gain, others off", cost, "gain, others on", cost], rows
    )


def _streams(runs: Runs) -> str:
    rows = []
    for streams in runs.streams:
        for variant in SHOWN:
            paced, saturated = (runs.row(regime, variant, streams) for regime in Regime)
            rows.append(
                [
                    f"{streams:,}",
                    VARIANTS[variant].partition(":")[0],
                    f"{saturated.figure(OUTPUT).value:,.0f}",
                    runs.cost(Regime.SATURATED, variant, streams),
                    _pair(paced, "TTFT p50", "TTFT p99", ",.0f"),
                    _pair(paced, "TPOT p50", "TPOT p99", ".1f"),
                    f"{paced.figure('gap p99').value:,.0f}",
                    _pair(paced, "node peak", "proxy peak", ".0f"),
                ]
            )
    head = [
        "streams",
        "parts",
        "saturated: tok/s",
        "CPU µs a token, node + proxy",
        "paced: TTFT p50, p99, ms",
        "TPOT p50, p99, ms",
        "gap p99, ms",
        "peak MiB, node, proxy",
    ]
    return markdown_table(head, rows)


def _pair(row: Row, one: str, other: str, form: str) -> str:
    return f"{row.figure(one).value:{form}}, {row.figure(other).value:{form}}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), read_report(FIGURES)))
