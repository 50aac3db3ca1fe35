"""Measures a decode engine's steps while a prefill engine fetches the blocks that become full (KV return)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bench.transfer.bench_engines import CacheShape, OfferingEngine
from pdserve.bench.transfer.messages import Assignment, TransferSetup
from pdserve.bench.transfer.prefill_process import PrefillProcess

ROUNDS = 8


@dataclass(frozen=True, slots=True)
class MeanStep:
    """The mean of all steps of one turn."""

    wall_s: float
    cpu_s: float
    """The CPU time of the whole process: of the step, and of the transfer thread beside it."""


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
    each_s = seconds / ROUNDS / 2
    engine = OfferingEngine(prefill.assign(Assignment(shape.block_bytes, shape.blocks, setup)), shape, setup)
    alone: list[MeanStep] = []
    returning: list[MeanStep] = []
    try:
        engine.offer()
        engine.finish()  # the engines have met
        before, thread_cpu_s = engine.returned, engine.cpu_s()
        for _ in range(ROUNDS):
            alone.append(_turn(step, each_s, lambda _: None))
            returning.append(_turn(step, each_s, engine.turn))
            engine.finish()
        returned, thread_cpu_s = engine.returned - before, engine.cpu_s() - thread_cpu_s
    finally:
        engine.close()
    return ReturnTimes(tuple(alone), tuple(returning), returned / (each_s * ROUNDS), thread_cpu_s / returned)


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
