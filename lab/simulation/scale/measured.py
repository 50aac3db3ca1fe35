"""Makes a profile of what ``pdserve bench engine`` and ``pdserve bench transfer`` have measured of one node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pdserve.bench.report import Report, Row, read_report
from pdserve.config import CacheConfig
from pdserve.engine.placement.step_cost import StepParts
from pdserve.plan.profile import VERSION, CacheGeometry, FrontCost, NodeSpeed, Profile, TransferCost

REPORTS = Path(__file__).parents[3] / "docs" / "benchmarks"
BLOCK_SIZE = CacheConfig().block_size
BLOCK_KIB = 360
"""A block of the model of ``bench engine``, and the row of ``bench transfer`` with blocks as large."""
CHUNK = 512
"""Chunks are as long as the longest that was measured."""
CACHE_TOKENS = 2**20


def measured_profile(max_num_seqs: int, folder: Path = REPORTS) -> Profile:
    """Returns the profile of a node with so many places. The reports say nothing of HTTP: a request costs none."""
    engine, transfer = (read_report(folder / name) for name in ("engine-cpu.json", "transfer.json"))
    decoding = [
        ((1.0, batch, batch * context), row.figure("and choice").value / 1e3)
        for row in _rows(engine, "decode step")
        for batch, context in [(int(row.at["batch"]), int(row.at["context"]))]
    ]
    prompts = [
        # Each token of a prompt reads half of it in the mean.
        ((1.0, chunk, chunk * chunk / 2), row.figure("step").value / 1e3)
        for row in _rows(engine, "prefill step")
        for chunk in [int(row.at["chunk"])]
    ]
    batch, request, context_token = _fit(decoding)
    chunk_alone, prompt_token, prompt_token_read = _fit(prompts)
    parts = StepParts(
        batch=batch,
        request=request,
        context_token=context_token,
        chunk_alone=chunk_alone,
        chunk_beside=chunk_alone,
        prompt_token=prompt_token,
        prompt_token_read=prompt_token_read,
    )
    (moved,) = (
        row
        for row in _rows(transfer, "transfer")
        if row.at["block"] == f"{BLOCK_KIB} KiB" and row.at["checksums"] == "on"
    )
    return Profile(
        version=VERSION,
        model=str(_rows(engine, "decode step")[0].at["model"]),
        machine=engine.machine.cpu,
        cores=engine.machine.cores,
        measured=engine.machine.measured,
        speeds=(NodeSpeed(nodes=1, steps=parts, beside=parts),),
        transfer=TransferCost(fixed_s=0.0, byte_s=1 / (moved.figure("engine").value * 1e9)),
        front=FrontCost(request_s=0.0, token_s=0.0),
        cache=CacheGeometry(
            block_size=BLOCK_SIZE,
            num_blocks=CACHE_TOKENS // BLOCK_SIZE,
            block_bytes=BLOCK_KIB * 1024,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=CHUNK,
        ),
    )


def _fit(observed: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Returns what each part takes, none less than nothing: least squares of relative errors."""
    counts = np.array([[count / seconds for count in parts] for parts, seconds in observed])
    scale = counts.max(axis=0)
    found = np.linalg.lstsq(counts / scale, np.ones(len(observed)), rcond=None)[0] / scale
    return tuple(max(0.0, float(value)) for value in found)


def _rows(report: Report, what: str) -> list[Row]:
    return [row for row in report.rows if row.what == what]
