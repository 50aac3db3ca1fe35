"""Measures a decode engine's steps while its transfer thread works on the same core.

The thread receives blocks of prompts, or a prefill engine fetches the blocks that become full (KV return).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bench.transfer.bench_engines import (
    BLOCK_TOKENS,
    Assignment,
    CacheShape,
    FetchingEngine,
    OfferingEngine,
    PrefillProcess,
    TransferSetup,
)

_RECEIVE_ROUNDS = 4
CHUNK_BLOCKS = 16
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
    each_s = seconds / _RECEIVE_ROUNDS / 2
    if tokens_per_s is None:
        assignment, blocks, ahead = Assignment(shape.block_bytes, shape.blocks, setup), shape.blocks, _AHEAD
    else:
        pause_s = CHUNK_BLOCKS * BLOCK_TOKENS / tokens_per_s
        assignment = Assignment(shape.block_bytes, shape.blocks, setup, CHUNK_BLOCKS, pause_s)
        blocks, ahead = min(shape.blocks, CHUNK_BLOCKS * math.ceil(each_s / pause_s + 1)), 1
    engine = FetchingEngine(prefill.assign(assignment), shape, setup)
    alone: list[float] = []
    receiving: list[float] = []
    rates: list[float] = []
    try:
        engine.fetch(CHUNK_BLOCKS)
        for _ in range(_RECEIVE_ROUNDS):
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


_RETURN_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class MeanStep:
    """The mean of all steps of one turn."""

    wall_s: float
    cpu_s: float
    """The CPU time of the process: of the step, and of the transfer thread beside it."""


@dataclass(frozen=True, slots=True)
class ReturnTimes:
    """Rounds of two turns, which follow each other so closely that other load changes little between them."""

    alone: tuple[MeanStep, ...]
    returning: tuple[MeanStep, ...]
    returns_per_s: float
    return_cpu_s: float
    """The CPU time of the decode engine's transfer thread for one return."""

    @property
    def wall_ratio(self) -> float:
        return _median_ratio([cost.wall_s for cost in self.returning], [cost.wall_s for cost in self.alone])

    @property
    def cpu_ratio(self) -> float:
        return _median_ratio([cost.cpu_s for cost in self.returning], [cost.cpu_s for cost in self.alone])


def while_returning(
    step: Callable[[], object], prefill: PrefillProcess, shape: CacheShape, setup: TransferSetup, seconds: float
) -> ReturnTimes:
    """Times ``step`` alone, and with as many returns as a decode node offers in a second.

    Raises BenchError, TransferError.
    """
    each_s = seconds / _RETURN_ROUNDS / 2
    engine = OfferingEngine(prefill.assign(Assignment(shape.block_bytes, shape.blocks, setup)), shape, setup)
    alone: list[MeanStep] = []
    returning: list[MeanStep] = []
    try:
        engine.offer()
        engine.finish()  # the engines have met
        before, thread_cpu_s = engine.returned, engine.cpu_s()
        for _ in range(_RETURN_ROUNDS):
            alone.append(_turn(step, each_s, lambda _: None))
            returning.append(_turn(step, each_s, engine.turn))
            engine.finish()
        returned, thread_cpu_s = engine.returned - before, engine.cpu_s() - thread_cpu_s
    finally:
        engine.close()
    return ReturnTimes(tuple(alone), tuple(returning), returned / (each_s * _RETURN_ROUNDS), thread_cpu_s / returned)


def _turn(step: Callable[[], object], seconds: float, between: Callable[[float], None]) -> MeanStep:
    """Calls ``step`` for so many seconds, and ``between`` with the time before each of them."""
    began_s, cpu_began_s, steps = time.perf_counter(), time.process_time(), 0
    while not steps or time.perf_counter() - began_s < seconds:
        between(time.perf_counter())
        step()
        steps += 1
    return MeanStep((time.perf_counter() - began_s) / steps, (time.process_time() - cpu_began_s) / steps)


def _median_ratio(dividends: list[float], divisors: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(dividends, divisors, strict=True))
