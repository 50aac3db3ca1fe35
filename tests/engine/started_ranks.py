"""Real ranks beside a rank 0 of a test. A program that imports only this module starts soon."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pdserve.config import (
    CacheConfig,
    CpuConfig,
    CpuKernels,
    Device,
    Dtype,
    EngineConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    TpBackend,
    TransferConfig,
)
from pdserve.engine.api_channel import WakeUp
from pdserve.engine.tp.tp_ranks import Ranks, running_ranks
from pdserve.liveness import LifeBoard, loop_names
from pdserve.machine.core_share import CoreShare
from pdserve.settings import cache_folder
from pdserve.wire.discovery import Role
from tests.processes import alive

TIMEOUT_MS = 1000


def engine_config(folder: Path, backend: TpBackend = TpBackend.AUTO, device: Device = Device.CPU) -> EngineConfig:
    return EngineConfig(
        role=Role.MIXED,
        boot_id=bytes(16),
        secret=b"",
        model_dir=str(folder),
        cache_dir=str(cache_folder(os.environ)),
        model=ModelConfig(dtype=Dtype.FP32, device=device),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(),
        transfer=TransferConfig(),
        cpu=CpuConfig(kernels=CpuKernels.TORCH),
        log=LogConfig(),
        parallel=ParallelConfig(tensor_parallel_size=2, backend=backend, timeout_ms=TIMEOUT_MS),
    )


@contextmanager
def started(config: EngineConfig) -> Iterator[Ranks]:
    cores = tuple(os.sched_getaffinity(0))
    wake_up = WakeUp()
    shares = [CoreShare(cores, len(cores)), CoreShare(cores[:1], 1)]
    with (
        closing(wake_up),
        closing(LifeBoard.create(len(loop_names(2)))) as life,
        tempfile.TemporaryDirectory() as folder,
        running_ranks(config, folder, shares, wake_up.fd, life) as ranks,
    ):
        yield ranks
    assert not any(alive(pid) for pid in ranks.pids)
