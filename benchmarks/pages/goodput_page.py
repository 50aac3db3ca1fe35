"""Writes the tables of prefill and decode beside one node: ``python -m benchmarks.pages.goodput_page``.

They are in benchmarks.md and when-it-pays-off.md in docs, and the README has the picture. Each run of ``pdserve bench
goodput`` is one file: ``goodput.json`` has the systems beside other servers, and the plots show it.
``goodput-avx2.json`` has one node and the pair beside ``llama-server`` on a CPU without AVX-512, ``goodput-long.json``
longer runs, ``goodput-shapes.json`` and ``goodput-mix.json`` other prompts and answers. In ``goodput-told.json`` and
``goodput-told-shapes.json`` every request names its targets (``--tell on``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.goodput.figures import (
    ALWAYS,
    AUTO,
    MIXED,
    SYSTEM,
    UNLOADED,
    WANTED,
    goodput_name,
)
from benchmarks.goodput.plots import GOODPUT_PLOT, LABELS, LATENCY_PLOT, write_plot
from benchmarks.goodput.workload import TOLD, Loop, Tightness
from benchmarks.pages.page_part import command_of, markdown_table, with_part
from benchmarks.settings import BenchGoodputConfig
from pdserve.bench.report import Report, Row, number, read_report
from pdserve.settings.setting import settings_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = DOCS / "benchmarks"
README = ROOT / "README.md"
PAGE = DOCS / "benchmarks.md"
DECISION_PAGE = DOCS / "when-it-pays-off.md"
FIGURES = DATA / "goodput.json"
TOLD_FIGURES = DATA / "goodput-told.json"
TOLD_SHAPES_FIGURES = DATA / "goodput-told-shapes.json"
AVX2_FIGURES = DATA / "goodput-avx2.json"
RUNS = {
    "A": FIGURES,
    "B": AVX2_FIGURES,
    "C": DATA / "goodput-long.json",
    "D": DATA / "goodput-shapes.json",
    "E": DATA / "goodput-mix.json",
    "F": TOLD_FIGURES,
    "G": TOLD_SHAPES_FIGURES,
}
"""The runs by their names on the pages."""

RUNS_BEGIN = "<!-- written by benchmarks/pages/goodput_page.py from goodput*.json -->"
DECISION_BEGIN = "<!-- written by benchmarks/pages/goodput_page.py from goodput-told-shapes.json -->"
README_BEGIN = "<!-- written by benchmarks/pages/goodput_page.py from goodput.json -->"

_NAMES = {MIXED: "one node", ALWAYS: "pair, `always`", AUTO: "pair"}
_LOADS = {Loop.CLOSED: "clients", Loop.OPEN: "rate %"}
_WISHES = (
    "good answers, tight target : those of the better of one node and `always`",
    "the same, loose target",
    "the same, tight target, most good answers at any load",
    "output tokens a second : those of one node",
    "median TTFT : that of one node",
    "ITL p99 : its own median",
)
_VERDICT = re.compile(
    r"(?P<verdict>\w+): .*, wanted (?P<wanted>at \w+ [\d.]+), holds at (?P<holds>\d+) of (?P<of>\d+)"
    r"(, undecided at (?P<undecided>\d+))?; the worst is (?P<worst>[^ ]+)"
)


def plots() -> str:
    """Returns both plots as Markdown."""
    folder = DATA.name
    return (
        f"![time to first token and pauses between tokens of each system]({folder}/{LATENCY_PLOT})\n\n"
        f"![good answers a second over the rate of requests]({folder}/{GOODPUT_PLOT})"
    )


def command(report: Report) -> str:
    """Returns the command that made a report, out of the settings that it holds."""
    settings = (setting for setting in settings_of(BenchGoodputConfig) if setting.section != "report")
    return command_of(report, "python -m benchmarks goodput", settings)


def picture(report: Report) -> str:
    """Returns the README's picture as Markdown, and what it shows."""
    machine = report.machine
    return (
        "![time to first token and pauses between tokens: pdserve, llama-server, OpenVINO]"
        f"(docs/benchmarks/{LATENCY_PLOT})\n\n"
        f"The same requests went to each system in turns, on the same {machine.cores} cores "
        f"({machine.cpu.replace('(R)', '')}). *{LABELS[MIXED]}* does prefill and decode in one process with both "
        f"cores; *{LABELS[AUTO]}* is two nodes that divide the cores, and *always* has the prefill node compute every "
        "prompt. Two nodes keep the pauses between tokens short. One node sends first tokens as soon or sooner, and "
        "with 4 clients it answers more. [All figures](docs/benchmarks.md#prefill-and-decode-beside-one-node)."
    )


def runs_table(reports: Mapping[str, Report]) -> str:
    """Returns what each run was, as Markdown."""
    rows = [
        [
            f"[{name}]({DATA.name}/{RUNS[name].name})",
            f"{report.machine.cpu.replace('(R)', '').replace(' Processor', '')}, {report.machine.measured[:10]}",
            f"`{command(report)}`",
        ]
        for name, report in reports.items()
    ]
    return markdown_table(["run", "2 cores of, date", "command"], rows)


def verdict_table(reports: Mapping[str, Report]) -> str:
    """Returns what was wanted of ``auto``, and how each run met it, as Markdown."""
    rows = []
    for wish, wanted in zip(_WISHES, WANTED, strict=True):
        found = [_VERDICT.match(wanted.verdict(report.rows)) for report in reports.values()]
        asked = next(match["wanted"] for match in found if match)
        rows.append([wish, asked, *(_verdict(match) if match else "" for match in found)])
    return markdown_table(["of the pair", "wanted", *reports], rows)


def _verdict(match: re.Match[str]) -> str:
    return f"{match['verdict']} {match['holds']}/{match['of']}, {match['worst']}"


def figures(report: Report) -> str:
    """Returns the figures of each system at each load of a report with one shape, as Markdown."""
    head = ["load", "system", "good answers a second: tight", "loose", "output, tok/s"]
    head += ["TTFT p50 / p99, ms", "ITL p50 / p99, ms"]
    rows = []
    for loop in Loop:
        for row in report.rows_of(loop.value):
            found = {figure.name: number(figure) for figure in row.figures}
            names = [*(goodput_name(tightness) for tightness in Tightness), "output"]
            rows.append(
                [
                    _load(row, loop),
                    _NAMES.get(str(row.at[SYSTEM]), str(row.at[SYSTEM])),
                    *(found.get(name, "") for name in names),
                    *(f"{found.get(f'{name} p50', '–')} / {found.get(f'{name} p99', '–')}" for name in ("TTFT", "ITL")),
                ]
            )
    return markdown_table(head, rows)


def _shape(report: Report) -> str:
    (shape,) = {str(row.at["shape"]) for row in report.rows_of(UNLOADED)}
    return shape


_COMPARED = ["output, tok/s: one node / pair", "TTFT p50, ms: one node / pair", "ITL p99, ms: one node / pair"]
_ALL_THREE = "one node / pair, `always` / pair"


def loads_table(reports: Mapping[str, Report]) -> str:
    """Returns a line for each load of each run, with what one node, ``always`` and ``auto`` did, as Markdown."""
    head = [
        "run",
        "prompt/answer",
        "load",
        f"good answers a second, tight target: {_ALL_THREE}",
        "the same, loose target",
    ]
    rows = []
    for name, report in reports.items():
        for loop in Loop:
            for (shape, load, _), systems in _by_load(report, loop).items():
                goodputs = [_compared(systems, goodput_name(tightness), _EACH) for tightness in Tightness]
                rows.append([name, shape, load, *goodputs, *_beside(systems)])
    return markdown_table([*head, *_COMPARED], rows)


def told_table(report: Report) -> str:
    """Returns a line for each load and target of a run whose requests name their targets, as Markdown."""
    rows = []
    for loop in Loop:
        for (shape, load, told), systems in _by_load(report, loop).items():
            rows.append(
                [shape, load, told, _compared(systems, goodput_name(Tightness(told)), _EACH), *_beside(systems)]
            )
    head = ["prompt/answer", "load", "ITL target", f"good answers a second: {_ALL_THREE}"]
    return markdown_table([*head, *_COMPARED], rows)


_EACH = (MIXED, ALWAYS, AUTO)


def _beside(systems: Mapping[str, Row]) -> list[str]:
    return [_compared(systems, name, (MIXED, AUTO)) for name in ("output", "TTFT p50", "ITL p99")]


def _compared(systems: Mapping[str, Row], name: str, of: Sequence[str]) -> str:
    """Returns one figure of some systems at one load."""
    found = {system: {figure.name: number(figure) for figure in row.figures} for system, row in systems.items()}
    return " / ".join(found[system].get(name, "–") if system in found else "–" for system in of)


def _by_load(report: Report, loop: Loop) -> dict[tuple[str, str, str], dict[str, Row]]:
    """Returns the rows of each shape, load and told target, by system."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in report.rows_of(loop.value):
        load = (str(row.at["shape"]), _load(row, loop), str(row.at.get(TOLD, "")))
        found.setdefault(load, {})[str(row.at[SYSTEM])] = row
    return found


def _load(row: Row, loop: Loop) -> str:
    load = row.at[_LOADS[loop]]
    clients = "1 client" if load == 1 else f"{load} clients"
    return clients if loop is Loop.CLOSED else f"rate {load} %"


def targets(report: Report) -> str:
    """Returns the targets of each shape of a report, as Markdown."""
    names = ("TTFT target", "ITL target tight", "ITL target loose", "requests at most")
    rows = []
    for row in report.rows_of(UNLOADED):
        found = {figure.name: number(figure) for figure in row.figures}
        rows.append([str(row.at["shape"]), *(found[name] for name in names)])
    head = ["prompt/answer", "TTFT target, ms", "tight ITL target, ms", "loose ITL target, ms"]
    return markdown_table([*head, "most requests a second of one node"], rows)


def read_runs() -> dict[str, Report]:
    return {name: read_report(file) for name, file in RUNS.items()}


def page_with(text: str, reports: Mapping[str, Report]) -> str:
    """Returns the text of benchmarks.md with all parts."""
    parts = [
        runs_table(reports),
        plots(),
        "What was wanted of the pair, at how many of the loads of each run it holds, and the worst ratio:",
        verdict_table(reports),
        f"Run A, prompts and answers of {_shape(reports['A'])} tokens:",
        figures(reports["A"]),
        "Runs D and E; run G is on the page [When prefill and decode pay off](when-it-pays-off.md#measured):",
        loads_table({name: report for name, report in reports.items() if name in "DE"}),
    ]
    return with_part(text, RUNS_BEGIN, "\n\n".join(parts))


def decision_page_with(text: str, report: Report) -> str:
    """Returns the text of when-it-pays-off.md with its table."""
    return with_part(text, DECISION_BEGIN, "\n\n".join([told_table(report), targets(report)]))


def readme_with(text: str, report: Report) -> str:
    """Returns the README's text with its picture."""
    return with_part(text, README_BEGIN, picture(report))


def main() -> None:
    reports = read_runs()
    write_plot(reports["A"], DATA)
    PAGE.write_text(page_with(PAGE.read_text(), reports))
    DECISION_PAGE.write_text(decision_page_with(DECISION_PAGE.read_text(), reports["G"]))
    README.write_text(readme_with(README.read_text(), reports["A"]))


if __name__ == "__main__":
    main()
