"""One rank's host memory that KV blocks pass through."""

from __future__ import annotations

import torch

from pdserve.config import EngineConfig, KvStaging, Switch
from pdserve.errors import ConfigError

MIB = 2**20


def staging_memory(config: EngineConfig, cache: torch.Tensor) -> torch.Tensor | None:
    """``[slots, ...]`` of the cache's blocks, as many on every rank; None where transfers reach the cache itself.

    Raises ConfigError if it would not hold a block, or if blocks cannot be checked without it.
    """
    on_gpu, staging = cache.device.type == "cuda", config.transfer.staging
    if on_gpu and staging is KvStaging.OFF and config.transfer.checksums is Switch.ON:
        raise ConfigError("--kv-staging off on a GPU needs --kv-checksums off: checksums are of host memory")
    if staging is KvStaging.OFF or (not on_gpu and staging is KvStaging.AUTO):
        return None
    slots = config.transfer.staging_mib * MIB // (cache[0].nbytes * config.parallel.tp)
    if not slots:
        raise ConfigError(f"--kv-staging-mib {config.transfer.staging_mib} does not hold one KV block")
    return torch.empty(slots, *cache.shape[1:], dtype=cache.dtype, pin_memory=on_gpu)
