"""Writes the table of simulated clusters in when-it-pays-off.md: ``python -m lab.clusters_page``, some minutes.

``pdserve plan`` simulates four nodes, each on a machine of its own, with the step times of a measured profile.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.pages.page_part import END, markdown_table, with_part
from pdserve.bench.report import Report

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "when-it-pays-off.md"
PROFILE = "docs/benchmarks/goodput/profile.json"
BEGIN = "<!-- written by lab/clusters_page.py with pdserve plan -->"
CLUSTERS = (("--mixed", "4"), ("--prefill", "1", "--decode", "3"), ("--prefill", "2", "--decode", "2"))


@dataclass(frozen=True)
class Case:
    """A load and its targets. Times are in ms."""

    prompt: int
    answer: int
    rate: float
    """Requests a second."""
    ttft: int
    itl: int


CASES = (
    Case(64, 256, 5, 400, 25),
    Case(64, 256, 5, 400, 60),
    Case(256, 64, 8, 900, 25),
    Case(256, 64, 10, 900, 25),
    Case(256, 64, 10, 900, 60),
    Case(256, 64, 12, 900, 60),
    Case(1024, 32, 2.8, 4000, 25),
    Case(1024, 32, 2.8, 4000, 60),
    Case(1024, 256, 1.2, 4000, 25),
    Case(1024, 256, 1.6, 4000, 25),
    Case(1024, 256, 1.6, 4000, 60),
)


def command(case: Case, cluster: Sequence[str]) -> list[str]:
    """Returns the words behind ``pdserve`` that predict what a cluster does."""
    load = ["--rate", f"{case.rate:g}", "--prompt-lengths", str(case.prompt), "--output-lengths", str(case.answer)]
    targets = ["--target-ttft-ms", str(case.ttft), "--target-itl-ms", str(case.itl)]
    return ["plan", "--profile", PROFILE, *load, *targets, *cluster]


def cells(case: Case) -> list[str]:
    """Returns the cells of a case: of each cluster the share of good answers, TTFT p90 and ITL p99."""
    return [
        f"{case.prompt}/{case.answer}",
        f"{case.rate:g}",
        f"{case.ttft:,} / {case.itl}",
        *(_predicted(command(case, cluster)) for cluster in CLUSTERS),
    ]


def _predicted(words: Sequence[str]) -> str:
    told = subprocess.run(
        [sys.executable, "-P", "-m", "pdserve", *words, "--json"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=600,
    )
    (row,) = msgspec.json.decode(told.stdout, type=Report).rows
    good, requests, ttft, itl = (row.figure(name).value for name in ("goodput", "requests", "TTFT p90", "ITL p99"))
    return f"{100 * good / requests:.0f} %; {ttft:,.0f} / {itl:.0f}"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Returns the table as Markdown."""
    what = "good answers; TTFT p90 / ITL p99, ms"
    head = ["prompt/answer, tokens", "requests a second", "targets: TTFT / ITL, ms", f"4 mixed nodes: {what}"]
    return markdown_table([*head, "1 prefill + 3 decode", "2 prefill + 2 decode"], rows)


def part_of(text: str) -> list[str]:
    """Returns the lines of the table in the page's ``text``."""
    _, _, part = text.partition(BEGIN)
    table_lines = [line for line in part.partition(END)[0].splitlines() if line.startswith("|")]
    return table_lines[2:]


def main() -> None:
    PAGE.write_text(with_part(PAGE.read_text(), BEGIN, table(map(cells, CASES))))


if __name__ == "__main__":
    main()
