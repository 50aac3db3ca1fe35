"""Measures a decode engine's steps while its transfer thread receives on the same core."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bench.transfer.bench_engines import BLOCK_TOKENS, CacheShape, FetchingEngine
from pdserve.bench.transfer.messages import Assignment, TransferSetup
from pdserve.bench.transfer.prefill_process import PrefillProcess

ROUNDS = 4
_CHUNK_BLOCKS = 16
_AHEAD = 6
"""The number of fetches that are ordered ahead, so that one always moves while a step computes."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The medians over rounds that take turns."""

    alone_s: float
    receiving_s: float
    bytes_per_s: float
    """The rate at which bytes were received meanwhile."""

    @property
    def slowdown(self) -> float:
        return self.receiving_s / self.alone_s


def while_receiving(
    step: Callable[[], object],
    prefill: PrefillProcess,
    shape: CacheShape,
    setup: TransferSetup,
    seconds: float,
    tokens_per_s: float | None,
) -> StepTimes:
    """Times ``step`` alone and with KV blocks coming in at ``tokens_per_s``, in chunks, or at full speed if it is None.

    Raises BenchError, TransferError.
    """
    each_s = seconds / ROUNDS / 2
    if tokens_per_s is None:
        assignment, blocks, ahead = Assignment(shape.block_bytes, shape.blocks, setup), shape.blocks, _AHEAD
    else:
        pause_s = _CHUNK_BLOCKS * BLOCK_TOKENS / tokens_per_s
        assignment = Assignment(shape.block_bytes, shape.blocks, setup, _CHUNK_BLOCKS, pause_s)
        blocks, ahead = min(shape.blocks, _CHUNK_BLOCKS * math.ceil(each_s / pause_s + 1)), 1
    engine = FetchingEngine(prefill.assign(assignment), shape, setup)
    alone: list[float] = []
    receiving: list[float] = []
    rates: list[float] = []
    try:
        engine.fetch(_CHUNK_BLOCKS)
        for _ in range(ROUNDS):
            alone += _steps(step, each_s, lambda: None)
            before, started = engine.bytes_received, time.perf_counter()
            receiving += _steps(step, each_s, lambda: _top_up(engine, blocks, ahead))
            rates.append((engine.bytes_received - before) / (time.perf_counter() - started))
            engine.finish()
    finally:
        engine.close()
    return StepTimes(statistics.median(alone), statistics.median(receiving), statistics.median(rates))


def _top_up(engine: FetchingEngine, blocks: int, ahead: int) -> None:
    engine.turn()
    while engine.open < ahead:
        engine.order(blocks)


def _steps(step: Callable[[], object], seconds: float, between: Callable[[], None]) -> list[float]:
    times: list[float] = []
    while not times or sum(times) < seconds:
        between()
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return times
