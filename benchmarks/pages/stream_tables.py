"""Writes the tables of streaming in benchmarks.md from stream.json: ``python -m benchmarks.pages.stream_tables``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from benchmarks.stream.figures import NODE_COST, OUTPUT, PROXY_COST, TTFT_MEAN, TTFT_P50, Regime
from pdserve.bench.report import Report, Row, read_report

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "benchmarks" / "stream.json"
BEGIN = "<!-- written by benchmarks/pages/stream_tables.py from stream.json -->"

STREAMS = 1024
ASKED = [
    ("dispatch", TTFT_MEAN, "batched dispatch, TTFT mean", "1.69"),
    ("dispatch", TTFT_P50, "batched dispatch, TTFT median", "3.23"),
    ("notify+fast-path", OUTPUT, "batch notify and fast path, tok/s", "1.20"),
    ("interval", OUTPUT, "`--stream-interval` 10, tok/s", "1.57"),
]
SHOWN = {"off": "all off", "on-interval": "all but the interval: the default", "on": "all on"}
SHOWN_STREAMS = (64, 2048)


class Runs:
    """The report's rows, by regime, number of streams and variant."""

    def __init__(self, report: Report) -> None:
        self._rows = {
            (regime, row.at["streams"], row.at["variant"]): row
            for regime in Regime
            for row in report.rows_of(regime.value)
        }

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
    return "\n\n".join([_asked(runs), _streams(runs)])


def page_with(text: str, report: Report) -> str:
    """Returns ``text`` with its tables replaced by those of ``report``."""
    return with_part(text, BEGIN, tables(report))


def _asked(runs: Runs) -> str:
    rows = []
    for part, figure, name, asked in ASKED:
        gains = [f"{runs.gain(Regime.SATURATED, part, others, figure)} ×" for others in ("off", "on")]
        rows.append([name, f"{asked} ×", *gains])
    return markdown_table(
        [f"saturated, {STREAMS:,} streams", "wanted", "gain, other parts off", "gain, other parts on"], rows
    )


def _streams(runs: Runs) -> str:
    rows = []
    for streams in SHOWN_STREAMS:
        for variant in SHOWN:
            paced, saturated = (runs.row(regime, variant, streams) for regime in Regime)
            rows.append(
                [
                    f"{streams:,}",
                    SHOWN[variant],
                    f"{saturated.figure(OUTPUT).value:,.0f}",
                    runs.cost(Regime.SATURATED, variant, streams),
                    _pair(paced, "TTFT p50", "TTFT p99", ",.0f"),
                    f"{paced.figure('gap p99').value:,.0f}",
                ]
            )
    head = ["streams", "parts", "saturated: tok/s", "CPU µs a token, node + proxy", "paced: TTFT p50 / p99, ms"]
    return markdown_table([*head, "gap p99, ms"], rows)


def _pair(row: Row, one: str, other: str, form: str) -> str:
    return f"{row.figure(one).value:{form}} / {row.figure(other).value:{form}}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), read_report(FIGURES)))
