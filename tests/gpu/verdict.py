"""Compares the figures of ``pdserve bench`` on a GPU with their targets, and writes down what was run where.

``python -m tests.gpu.verdict FILE… --out REPORT --tests LOG`` takes the reports of ``engine``, ``transfer`` and
``goodput``, and the output of pytest. REPORT has the chip, versions, each target with its bound and verdict, and every
row. It exits with status 1 if a target is missed or was not measured.

``python -m tests.gpu.verdict --page`` writes the part of benchmarks.md that shows the report of ``docs``.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from pdserve.bench.report import (
    Better,
    Figure,
    Report,
    Row,
    Unit,
    chip_name,
    number,
    read_report,
    this_machine,
    to_json,
)

MODEL = "8B-shaped"
VERDICT, COMPILED, LEAST = (
    "target",
    "kernel of an 8B model, compiled",
    "least time of a step of an 8B model in bf16",
)
REGISTERS, SPILLED, SHARED, OCCUPANCY = (
    "registers of a thread",
    "spilled bytes of a thread",
    "shared memory of a program",
    "occupancy",
)
DOCS = Path(__file__).parents[2] / "docs"
PAGE, REPORT = DOCS / "benchmarks.md", DOCS / "benchmarks" / "gpu" / "report.json"
BEGIN = "<!-- written by tests/gpu/verdict.py from gpu/report.json -->"


@dataclass(frozen=True)
class Target:
    """A ratio of a report, with its lower or upper bound."""

    name: str
    what: str
    at: Mapping[str, int | str]
    figure: str
    bound: float
    better: Better
    over: str = ""
    """If this is not empty, the figure is divided by this one of the same row."""

    def measured(self, row: Row) -> float:
        return row.figure(self.figure).value / (row.figure(self.over).value if self.over else 1.0)

    def met(self, value: float) -> bool:
        return value >= self.bound if self.better is Better.HIGHER else value <= self.bound


PACKED = ("16 layers 8B-shaped in 4 bits", "16 layers 8B-shaped in FP8")
WHOLE = ("gpt-oss-20b-shaped", "4 layers DeepSeek-V3-shaped", "8 layers Qwen3-30B-A3B-shaped")
"""The models of ``whole_models``."""
EXPERTS = "DeepSeek-V3's experts in FP8"
TARGETS = (
    Target(
        "decode attention, share of the copy bandwidth",
        "decode step",
        {"model": MODEL, "batch": 64, "context": 1024},
        "KV read : copy",
        0.8,
        Better.HIGHER,
    ),
    Target(
        "decode step of 1, times (weights + KV) / bandwidth",
        "decode step",
        {"model": MODEL, "batch": 1},
        "step : least",
        1.3,
        Better.LOWER,
    ),
    Target(
        "decode step of 64, times (weights + KV) / bandwidth",
        "decode step",
        {"model": MODEL, "batch": 64},
        "step : least",
        1.3,
        Better.LOWER,
    ),
    Target(
        "prefill of 8192 tokens, share of the product rate",
        "prefill step",
        {"model": MODEL, "chunk": 8192},
        "rate : matrix product",
        0.5,
        Better.HIGHER,
    ),
    Target(
        "KV blocks from GPU memory to GPU memory, share of ucx_perftest's rate",
        "transfer",
        {"block": "2048 KiB", "checksums": "off"},
        "engine : ucx_perftest",
        0.8,
        Better.HIGHER,
    ),
    Target(
        "ITL p99 of one node with 64 clients, times its median",
        "closed loop",
        {"system": "mixed", "clients": 64},
        "ITL p99",
        8.0,
        Better.LOWER,
        over="ITL p50",
    ),
    *(
        Target(
            f"decode step of {batch}, {model}, times (weights + KV) / bandwidth",
            "decode step",
            {"model": model, "batch": batch},
            "step : least",
            1.4,
            Better.LOWER,
        )
        for model in (*PACKED, *WHOLE)
        for batch in (1, 16, 64)
    ),
    *(
        Target(
            f"prefill of {chunk} tokens, {model}, share of the product rate",
            "prefill step",
            {"model": model, "chunk": chunk},
            "rate : matrix product",
            0.5,
            Better.HIGHER,
        )
        for models, chunk in ((PACKED, 8192), (WHOLE, 4096))
        for model in models
    ),
    *(
        Target(
            f"experts of {tokens} tokens, {EXPERTS}, times bytes / bandwidth",
            "experts alone",
            {"model": EXPERTS, "batch": tokens},
            "experts : least",
            1.4,
            Better.LOWER,
        )
        for tokens in (1, 16, 64)
    ),
    Target(
        f"experts of 4096 tokens, {EXPERTS}, share of the product rate",
        "experts alone",
        {"model": EXPERTS, "batch": 4096},
        "rate : matrix product",
        0.5,
        Better.HIGHER,
    ),
)


@dataclass(frozen=True)
class Judged:
    """A target, and what was measured of it; None if nothing was."""

    target: Target
    value: float | None

    @property
    def met(self) -> bool:
        return self.value is not None and self.target.met(self.value)

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.target.better is Better.HIGHER else '≤'} {self.target.bound}"

    @property
    def verdict(self) -> str:
        return "met" if self.met else "MISSED" if self.value is not None else "not measured"

    def __str__(self) -> str:
        measured = "not measured" if self.value is None else f"{self.value:.2f}"
        return f"{'met   ' if self.met else 'MISSED'}  {self.target.name}: {measured} ({self.wanted})"

    def row(self) -> Row:
        figures = () if self.value is None else (Figure("measured", self.value, Unit.RATIO, self.target.better),)
        return Row(VERDICT, {"name": self.target.name, "wanted": self.wanted, "verdict": self.verdict}, figures)


def judged(*reports: Report) -> list[Judged]:
    """Returns what was measured of each target."""
    found = []
    for target in TARGETS:
        rows = [row for report in reports for row in report.rows_of(target.what)]
        values = [target.measured(row) for row in rows if target.at.items() <= row.at.items()]
        found.append(Judged(target, values[0] if values else None))
    return found


def whole_report(reports: Sequence[Report], tests: str) -> Report:
    """Returns one report of all that was run on this machine. ``tests`` is the output of pytest."""
    results = [line.strip("= ") for line in tests.splitlines() if line.startswith("=") and " in " in line]
    notes = (f"triton {version('triton')}", *(f"tests: {line}" for line in results))
    rows = [one.row() for one in judged(*reports)] + [row for report in reports for row in report.rows]
    return Report("gpu", this_machine(chip_name()), {}, notes, tuple(rows))


def part(report: Report) -> str:
    """Returns what a page shows of a report: its targets, or without a chip what the compiler has said."""
    machine = report.machine
    head = f"`make gpu`, {machine.chip or 'no GPU'}, torch {machine.torch}, {machine.measured} UTC: "
    notes = head + "; ".join(report.notes) + "."
    if report.rows_of(VERDICT):
        lines = [
            [row.at["name"], row.at["wanted"], *(number(one) for one in row.figures or ()), row.at["verdict"]]
            for row in report.rows_of(VERDICT)
        ]
        cells = [[str(cell) for cell in (*line[:2], line[2] if len(line) > 3 else "", line[-1])] for line in lines]
        return f"{notes}\n\n{markdown_table(['what', 'wanted', 'measured', 'verdict'], cells)}"
    kernels: dict[str, dict[str, str]] = defaultdict(dict)
    for row in report.rows_of(COMPILED):
        figures = (row.figure(name) for name in (REGISTERS, SHARED, OCCUPANCY))
        kernels[str(row.at["kernel"])][f"sm_{row.at['sm']}"] = " / ".join(number(figure) for figure in figures)
    kinds = list(dict.fromkeys(f"sm_{row.at['sm']}" for row in report.rows_of(COMPILED)))
    table = markdown_table(
        [f"kernel: {REGISTERS} / {SHARED}, KiB / {OCCUPANCY}", *kinds],
        [[f"`{name}`", *(found.get(kind, "") for kind in kinds)] for name, found in kernels.items()],
    )
    least: dict[str, dict[str, str]] = defaultdict(dict)
    for row in report.rows_of(LEAST):
        least[str(row.at["step"])][str(row.at["chip"])] = number(row.figures[0])
    chips = list(dict.fromkeys(str(row.at["chip"]) for row in report.rows_of(LEAST)))
    bounds = markdown_table(
        [f"{LEAST}, ms", *chips], [[step, *(found[chip] for chip in chips)] for step, found in least.items()]
    )
    return f"{notes}\n\n{table}\n\n{bounds}"


def page_with(text: str, report: Report) -> str:
    """Returns ``text`` with its part replaced by that of ``report``."""
    return with_part(text, BEGIN, part(report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tests", type=Path)
    parser.add_argument("--page", action="store_true")
    chosen = parser.parse_args()
    if chosen.page:
        PAGE.write_text(page_with(PAGE.read_text(), read_report(REPORT)))
        return 0
    reports = [read_report(path) for path in chosen.reports if path.is_file()]
    found = judged(*reports)
    for one in found:
        print(one)
    if chosen.out is not None:
        tests = chosen.tests.read_text() if chosen.tests is not None and chosen.tests.is_file() else ""
        chosen.out.write_bytes(to_json(whole_report(reports, tests)))
    return 0 if all(one.met for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
