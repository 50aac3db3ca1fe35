"""Turns measurements into rows of a report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.bench.report import Better, Figure, Row, Unit
from pdserve.bench.transfer.decode_steps import StepTimes
from pdserve.bench.transfer.moves import Moves
from pdserve.bench.transfer.returning_steps import ReturnTimes
from pdserve.bench.transfer.yardsticks import NixlRate
from pdserve.config import Switch
from pdserve.engine.kv_connector.return_offers import RETURNS_PER_S


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """The rates of the yardsticks at one block size, in bytes/s."""

    perftest: float
    """The rate of ``ucx_perftest`` over endpoints like pdserve's, which outlive their peer."""
    perftest_any: float
    """The rate of ``ucx_perftest`` over the endpoints that UCX makes by default."""
    nixl: NixlRate | None
    copy: float


def transfer_rows(moved: Mapping[Switch, Moves], yardsticks: Yardsticks) -> list[Row]:
    """Returns the engine's rate beside the yardsticks', for each setting of ``--kv-checksums``."""
    return [_transfer_row(way, found, yardsticks) for way, found in moved.items()]


def _transfer_row(way: Switch, found: Moves, yardsticks: Yardsticks) -> Row:
    copy_s = found.block_bytes / yardsticks.copy
    figures = [
        _rate("engine", found.bytes_per_s),
        _rate("ucx_perftest", yardsticks.perftest),
        _rate("ucx_perftest, any endpoint", yardsticks.perftest_any),
        Figure("engine : ucx_perftest", found.bytes_per_s / yardsticks.perftest, Unit.RATIO, Better.HIGHER),
        Figure("engine : any endpoint", found.bytes_per_s / yardsticks.perftest_any, Unit.RATIO, Better.HIGHER),
    ]
    if yardsticks.nixl is not None:
        figures += [
            _rate("NIXL", yardsticks.nixl.total),
            Figure("engine : NIXL", found.bytes_per_s / yardsticks.nixl.total, Unit.RATIO, Better.HIGHER),
            Figure("engine : NIXL moving", found.bytes_per_s / yardsticks.nixl.moving, Unit.RATIO, Better.HIGHER),
        ]
    figures += [
        _us("receive CPU/block", found.receive_cpu_s),
        _us("send CPU/block", found.send_cpu_s),
        _rate("CPU allows", found.block_bytes / max(found.receive_cpu_s, found.send_cpu_s)),
        _us("one copy of a block", copy_s),
    ]
    return Row("transfer", {"block": block_name(found.block_bytes), "checksums": way.value}, tuple(figures))


def checksum_row(moved: Mapping[Switch, Moves], prefill_s: float) -> Row:
    """Returns what checksums add to a fetch, and to a request whose prompt takes ``prefill_s`` a block to compute."""
    on, off = moved[Switch.ON], moved[Switch.OFF]
    cpu_s = on.receive_cpu_s - off.receive_cpu_s + on.send_cpu_s - off.send_cpu_s
    figures = (
        Figure("fetch with", on.median_s * 1e3, Unit.MS, Better.LOWER),
        Figure("fetch without", off.median_s * 1e3, Unit.MS, Better.LOWER),
        _us("added to a block", (on.median_s - off.median_s) / on.blocks),
        _us("receive CPU added", on.receive_cpu_s - off.receive_cpu_s),
        _us("send CPU added", on.send_cpu_s - off.send_cpu_s),
        Figure("with : without", on.median_s / off.median_s, Unit.RATIO, Better.LOWER),
        # This is a small difference of two figures: noise makes it anything near 0, so no report is judged by it.
        Figure("both CPUs added : prefill of a block", cpu_s / prefill_s, Unit.RATIO),
    )
    return Row("checksums", {"block": block_name(on.block_bytes), "blocks": on.blocks}, figures)


def overhead_row(moved: Mapping[Switch, Moves]) -> Row:
    """Returns the cost of a block itself, measured with blocks so small that copying them takes no time."""
    on, off = moved[Switch.ON], moved[Switch.OFF]
    figures = (
        _us("receive CPU", off.receive_cpu_s),
        _us("send CPU", off.send_cpu_s),
        _us("receive CPU with checksums", on.receive_cpu_s),
        _us("send CPU with checksums", on.send_cpu_s),
    )
    return Row("overhead of a block", {"block": block_name(on.block_bytes), "blocks": on.blocks}, figures)


def decode_row(model: str, batch: int, tokens_per_s: float | None, times: StepTimes) -> Row:
    """Returns a row of decode steps with KV blocks coming in, against steps without."""
    rate = f"{tokens_per_s:g} tok/s" if tokens_per_s else "all that can"
    figures = (
        Figure("step alone", times.alone_s * 1e3, Unit.MS, Better.LOWER),
        Figure("step receiving", times.receiving_s * 1e3, Unit.MS, Better.LOWER),
        _rate("received", times.bytes_per_s),
        Figure("receiving : alone", times.slowdown, Unit.RATIO, Better.LOWER),
        Figure("added for 1 GB/s", (times.slowdown - 1) / (times.bytes_per_s / 1e9), Unit.RATIO),
    )
    return Row("decode step while KV blocks come in", {"model": model, "batch": batch, "arriving": rate}, figures)


def return_row(model: str, batch: int, times: ReturnTimes) -> Row:
    """Returns a row of decode steps while a prefill node fetches the blocks that become full, against steps alone."""
    alone, returning = times.alone, times.returning
    figures = (
        Figure("step alone", statistics.median(cost.wall_s for cost in alone) * 1e3, Unit.MS, Better.LOWER),
        Figure("step returning", statistics.median(cost.wall_s for cost in returning) * 1e3, Unit.MS, Better.LOWER),
        Figure("returns in a second", times.returns_per_s, Unit.COUNT),
        Figure("returning : alone", times.wall_ratio, Unit.RATIO, Better.LOWER),
        Figure("CPU alone", statistics.median(cost.cpu_s for cost in alone) * 1e3, Unit.MS, Better.LOWER),
        Figure("CPU returning : alone", times.cpu_ratio, Unit.RATIO, Better.LOWER),
        Figure("CPU of a return", times.return_cpu_s * 1e3, Unit.MS, Better.LOWER),
        Figure("all returns' share of a core", times.return_cpu_s * RETURNS_PER_S, Unit.RATIO, Better.LOWER),
    )
    return Row("decode step while blocks return", {"model": model, "batch": batch}, figures)


def copy_row(bytes_per_s: float) -> Row:
    return Row("copy in memory, one core", {}, (_rate("copy", bytes_per_s),))


def block_name(size: int) -> str:
    return f"{size // 1024} KiB" if size >= 1024 else f"{size} B"


def _rate(name: str, bytes_per_s: float) -> Figure:
    return Figure(name, bytes_per_s / 1e9, Unit.GB_PER_S, Better.HIGHER)


def _us(name: str, seconds: float) -> Figure:
    return Figure(name, seconds * 1e6, Unit.US, Better.LOWER)
