"""One rank's host memory that KV blocks pass through."""

from __future__ import annotations

import torch

from pdserve.config import EngineConfig, KvStaging
from pdserve.errors import ConfigError

MIB = 2**20


def staging_memory(config: EngineConfig, cache: torch.Tensor) -> torch.Tensor | None:
    """``[slots, ...]`` of the cache's blocks, as many on every rank; None where transfers reach the cache itself.

    Raises ConfigError if it would not hold a block.
    """
    on_gpu = cache.device.type == "cuda"
    if not on_gpu and config.transfer.staging is KvStaging.AUTO:
        return None
    slots = config.transfer.staging_mib * MIB // (cache[0].nbytes * config.parallel.tp)
    if not slots:
        raise ConfigError(f"--kv-staging-mib {config.transfer.staging_mib} does not hold one KV block")
    return torch.empty(slots, *cache.shape[1:], dtype=cache.dtype, pin_memory=on_gpu)
