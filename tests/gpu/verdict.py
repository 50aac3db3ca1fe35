"""Compares the figures of ``pdserve bench engine`` and ``pdserve bench transfer`` on a GPU with their targets.

``python -m tests.gpu.verdict FILE…`` takes their reports. It exits with status 1 if a target is missed or was not
measured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.report import Better, Report, read_report

MODEL = "8B-shaped"


@dataclass(frozen=True)
class Target:
    """A ratio of the report, with its lower or upper bound."""

    name: str
    what: str
    at: Mapping[str, int | str]
    figure: str
    bound: float
    better: Better

    def met(self, value: float) -> bool:
        return value >= self.bound if self.better is Better.HIGHER else value <= self.bound


PACKED = ("16 layers 8B-shaped in 4 bits", "16 layers 8B-shaped in FP8")
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
    *(
        Target(
            f"decode step of {batch}, {model}, times (weights + KV) / bandwidth",
            "decode step",
            {"model": model, "batch": batch},
            "step : least",
            1.4,
            Better.LOWER,
        )
        for model in PACKED
        for batch in (1, 16, 64)
    ),
    *(
        Target(
            f"prefill of 8192 tokens, {model}, share of the product rate",
            "prefill step",
            {"model": model, "chunk": 8192},
            "rate : matrix product",
            0.5,
            Better.HIGHER,
        )
        for model in PACKED
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


def judged(*reports: Report) -> list[tuple[str, bool]]:
    """Returns a line for each target, and whether the target is met."""
    lines = []
    for target in TARGETS:
        rows = [row for report in reports for row in report.rows_of(target.what)]
        found = [row.figure(target.figure).value for row in rows if target.at.items() <= row.at.items()]
        sign = "≥" if target.better is Better.HIGHER else "≤"
        measured = f"{found[0]:.2f}" if found else "not measured"
        met = bool(found) and target.met(found[0])
        lines.append((f"{'met   ' if met else 'MISSED'}  {target.name}: {measured} ({sign} {target.bound})", met))
    return lines


def main() -> int:
    lines = judged(*(read_report(Path(path)) for path in sys.argv[1:] if Path(path).is_file()))
    for line, _ in lines:
        print(line)
    return 0 if all(met for _, met in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
