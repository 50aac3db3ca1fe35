"""Which cores each rank of an engine has, and how a process keeps to them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pdserve.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.process import partition_cores


def rank_cores(config: EngineConfig) -> list[tuple[int, ...]]:
    """Each rank's cores: a share of ``--cores``, or of all that this process may use."""
    return partition_cores(config.cpu.cores or sorted(os.sched_getaffinity(0)), config.parallel.tp)


def pin(cores: Sequence[int]) -> None:
    """Before torch is imported, which sizes its thread pool by the cores that it finds. No cores: all of them.

    Raises ConfigError if the process may not use them.
    """
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as exc:
            raise ConfigError(f"cannot run on cores {tuple(cores)}: {exc}") from exc
