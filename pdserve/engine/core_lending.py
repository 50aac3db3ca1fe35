"""Lends an engine's cores to others of this machine while it sleeps, and borrows theirs, by their core ledger."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pdserve.config import EngineConfig
from pdserve.machine.core_ledger import CoreLedger
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels

log = logging.getLogger(__name__)

LOOK_FOR_DEAD_S = 1.0


class Cores(Protocol):
    """What the step loop tells of itself, so that its cores are used while it does not."""

    def begin_step(self) -> None:
        """The engine is going to compute a step."""

    def sleep(self) -> None:
        """The engine has nothing to compute, and is going to wait."""

    @property
    def borrowed(self) -> int:
        """The cores of other engines that compute for this one."""

    @property
    def borrowed_s(self) -> float:
        """The sum of the times for which cores were borrowed, in seconds."""

    def close(self) -> None:
        """Ends all use of others' cores."""


class OwnCores:
    """Satisfies ``Cores`` for an engine that lends and borrows none."""

    borrowed = 0
    borrowed_s = 0.0

    def begin_step(self) -> None:
        pass

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


class LedgerCores:
    """Satisfies ``Cores`` with a ledger."""

    def __init__(self, kernels: CompiledKernels, ledger: CoreLedger, own: Sequence[int]) -> None:
        """Takes over ``ledger``, and its cores ``own`` for this engine. Raises ConfigError."""
        self._kernels, self._ledger = kernels, ledger
        entered = len(ledger.read())
        if beyond := [core for core in own if core >= entered]:
            log.warning("the core ledger was made for fewer cores, so cores %s are not lent", beyond)
        engine = ledger.join(self._forget)
        self._cores = kernels.lent_cores(ledger.words, engine, own)
        self._look_at = 0.0

    def begin_step(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_FOR_DEAD_S
            self._ledger.forget_dead(self._forget)
        self._cores.begin_step()

    def sleep(self) -> None:
        self._cores.sleep()

    @property
    def borrowed(self) -> int:
        return self._cores.borrowed

    @property
    def borrowed_s(self) -> float:
        return self._cores.borrowed_s

    def close(self) -> None:
        self._cores.close()
        self._ledger.close()

    def _forget(self, engine: int) -> None:
        self._kernels.forget_engine(self._ledger.words, engine)


def open_cores(config: EngineConfig, kernels: Kernels) -> Cores:
    """Returns the cores of an engine with these kernels. Raises ConfigError if the ledger cannot be used.

    Only the compiled kernels can compute on cores that come and go.
    """
    if not config.cpu.core_ledger:
        return OwnCores()
    if not isinstance(kernels, CompiledKernels) or config.parallel.tensor_parallel_size > 1:
        log.info("this engine lends and borrows no cores: only one rank with the compiled CPU kernels does")
        return OwnCores()
    ledger = CoreLedger(Path(config.cpu.core_ledger))
    try:
        return LedgerCores(kernels, ledger, config.cpu.cores or sorted(os.sched_getaffinity(0)))
    except BaseException:
        ledger.close()
        raise
