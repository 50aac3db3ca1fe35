"""One rank's model runner, made in the same way on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from pdserve.config import EngineConfig
from pdserve.engine.kernel_set import cpu_kernels
from pdserve.models.backend import Backend, choose_device, open_backend
from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.runner import ModelRunner
from pdserve.models.tensor_parallel import TpGroup


def load_runner(
    config: EngineConfig,
    decoder: DecoderConfig,
    num_blocks: int,
    max_model_len: int,
    tp: TpGroup,
    backend: Backend,
    kv_memory: memoryview | None = None,
) -> ModelRunner:
    """Raises ModelError if the folder does not hold the model, or it cannot be split over the ranks."""
    folder, block_size = Path(config.model_dir), config.cache.block_size
    return ModelRunner(
        folder,
        decoder,
        config.model.dtype,
        block_size,
        num_blocks,
        max_model_len,
        backend.kernels,
        backend.device,
        tp,
        kv_memory,
    )


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """What a rank of this node computes on. Raises ConfigError if that is not there, or cannot be used so."""
    return choose_device(config.model.device, rank, config.parallel.tp)


def rank_backend(config: EngineConfig, device: torch.device) -> Backend:
    """The kernels for it. Raises ConfigError if there are none."""
    return open_backend(device, partial(cpu_kernels, config.cpu.kernels, Path(config.cache_dir)))
