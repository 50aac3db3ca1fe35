"""Writes what goodput.md in docs/benchmarks shows, and the README's picture: ``python -m tests.docs.goodput_page``.

``goodput.json`` has the systems beside other servers, and no request names a target; the plots show it.
``goodput-avx2.json`` has a mixed node and the pair beside ``llama-server`` on a CPU without AVX-512.
``goodput-long.json`` has the systems alone, in longer runs, ``goodput-shapes.json`` with other prompts and answers,
and ``goodput-mix.json`` with many short requests and a few long ones. In ``goodput-told.json`` and
``goodput-told-shapes.json`` every request names a target (``--tell on``).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pdserve.bench.goodput.figures import (
    AGAINST_BEST,
    AGAINST_PEER,
    GOODPUTS,
    OUTPUT_RATIO,
    RATE,
    STEADINESS,
    SYSTEM,
    TTFT_RATIO,
    UNLOADED,
    against,
    goodput_name,
    verdicts,
)
from pdserve.bench.goodput.plots import GOODPUT_PLOT, LATENCY_PLOT, write_plot
from pdserve.bench.goodput.workload import TOLD, Loop, Tightness
from pdserve.bench.report import Report, Row, number, read_report
from pdserve.bench_config import BenchGoodputConfig
from pdserve.settings.setting import settings_of
from tests.docs.page_part import command_of, markdown_table, with_interval, with_part

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
PAGE = DOCS / "goodput.md"
FIGURES = DOCS / "goodput.json"
LONG_FIGURES = DOCS / "goodput-long.json"
SHAPES_FIGURES = DOCS / "goodput-shapes.json"
MIX_FIGURES = DOCS / "goodput-mix.json"
AVX2_FIGURES = DOCS / "goodput-avx2.json"
TOLD_FIGURES = DOCS / "goodput-told.json"
TOLD_SHAPES_FIGURES = DOCS / "goodput-told-shapes.json"

_LOADS = {Loop.CLOSED: "clients", Loop.OPEN: "rate %"}
_RATIOS = (*(goodput_name(tightness) for tightness in Tightness), OUTPUT_RATIO, TTFT_RATIO, STEADINESS)


def plots() -> str:
    """Returns both plots as Markdown."""
    return (
        f"![TTFT against ITL of each system, by the number of clients]({LATENCY_PLOT})\n\n"
        f"![good answers a second over the rate of requests]({GOODPUT_PLOT})"
    )


def figures(report: Report, file: Path) -> str:
    """Returns what the report in ``file`` says as Markdown."""
    machine = report.machine
    parts = [
        f"`{command(report)}` on {machine.cores} cores ({machine.cpu}, torch {machine.torch}), {machine.measured} UTC: "
        f"{'; '.join(note for note in report.notes if note not in verdicts(report.rows))}. "
        f"[All figures]({file.name}).",
        "\n".join(f"* {verdict}" for verdict in verdicts(report.rows)),
        _unloaded(report),
        *(_systems(report, loop) for loop in Loop if report.rows_of(loop.value)),
        _ratios(report),
        _peers(report),
    ]
    return "\n\n".join(part for part in parts if part)


def command(report: Report) -> str:
    """Returns the command that made a report, out of the settings that it has kept."""
    settings = (setting for setting in settings_of(BenchGoodputConfig) if setting.section != "report")
    return command_of(report, "pdserve bench goodput", settings)


def picture(report: Report) -> str:
    """Returns the README's picture as Markdown, and what it shows."""
    machine = report.machine
    systems = dict.fromkeys(str(row.at[SYSTEM]) for row in report.rows_of(Loop.CLOSED.value))
    return (
        f"![time to first token against gaps between tokens: {', '.join(systems)}](docs/benchmarks/{LATENCY_PLOT})\n\n"
        f"The same requests to each system, in turns on the same {machine.cores} cores ({machine.cpu}): how long a "
        "client waits for the first token, and the 99th percentile of the gaps between later ones. "
        "[How it was measured, and goodput](docs/benchmarks/goodput.md)."
    )


def written(text: str, part: str, file: Path) -> str:
    """Returns a page's ``text`` with ``part``, which is made of ``file``, in its place."""
    return with_part(text, f"<!-- written by tests/docs/goodput_page.py from {file.name} -->", part)


def page_with(text: str, beside: Report) -> str:
    """Returns the page's ``text`` with all parts."""
    text = written(text, f"{plots()}\n\n{figures(beside, FIGURES)}", FIGURES)
    told = (TOLD_FIGURES, TOLD_SHAPES_FIGURES)
    for file in (AVX2_FIGURES, LONG_FIGURES, SHAPES_FIGURES, MIX_FIGURES, *told):
        text = written(text, figures(read_report(file), file), file)
    return text


def _unloaded(report: Report) -> str:
    names = ("TTFT mean", "ITL p50", "requests at most", "TTFT target", "ITL target tight", "ITL target loose")
    units = ("ms", "ms", "req/s", "ms", "ms", "ms")
    head = ["shape", *(f"{name}, {unit}" for name, unit in zip(names, units, strict=True))]
    return markdown_table(head, ([str(row.at["shape"]), *_cells(row, names)] for row in report.rows_of(UNLOADED)))


def _systems(report: Report, loop: Loop) -> str:
    names = [RATE] if loop is Loop.OPEN else []
    names += [*GOODPUTS, "output", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "failed"]
    head = [loop.value, _LOADS[loop], SYSTEM, *([RATE + ", req/s"] if loop is Loop.OPEN else [])]
    head += [*(f"{name}, req/s" for name in GOODPUTS), "tok/s"]
    head += ["TTFT p50, ms", "TTFT p99", "ITL p50, ms", "ITL p99", "failed"]
    return markdown_table(
        head,
        (
            [str(row.at["shape"]), _load(row, loop), str(row.at[SYSTEM]), *_cells(row, names)]
            for row in report.rows_of(loop.value)
        ),
    )


def _ratios(report: Report) -> str:
    rows = []
    for loop, load in _LOADS.items():
        for row in report.rows_of(against(loop)):
            rows.append(
                [str(row.at["shape"]), f"{load} {_load(row, loop)}", *(with_interval(row, name) for name in _RATIOS)]
            )
    for row in report.rows_of(AGAINST_BEST):
        rows.append([str(row.at["shape"]), "highest of all loads", *_cells(row, _RATIOS)])
    return markdown_table(["auto against the better of mixed and always", "load", *_RATIOS], rows) if rows else ""


def _peers(report: Report) -> str:
    names = [*(goodput_name(tightness) for tightness in Tightness), "output : peer", "TTFT p50 : peer"]
    rows = []
    for loop, load in _LOADS.items():
        for row in report.rows_of(f"{AGAINST_PEER}, {loop.value}"):
            rows.append([str(row.at["shape"]), f"{load} {_load(row, loop)}", str(row.at["peer"]), *_cells(row, names)])
    return markdown_table(["auto against other servers", "load", "peer", *names], rows) if rows else ""


def _load(row: Row, loop: Loop) -> str:
    load, told = row.at[_LOADS[loop]], row.at.get(TOLD)
    return str(load) if told is None else f"{load}, told {told}"


def _cells(row: Row, names: Iterable[str]) -> list[str]:
    """Returns the figures of ``names``; an empty cell for each that the row lacks."""
    found = {figure.name: number(figure) for figure in row.figures}
    return [found.get(name, "") for name in names]


def main() -> None:
    report = read_report(FIGURES)
    write_plot(report, DOCS)
    PAGE.write_text(page_with(PAGE.read_text(), report))
    README.write_text(written(README.read_text(), picture(report), FIGURES))


if __name__ == "__main__":
    main()
