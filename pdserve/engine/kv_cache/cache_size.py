"""How many blocks the KV cache of an engine has."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from pdserve.config import CacheConfig
from pdserve.errors import ConfigError
from pdserve.models.checkpoint.weights import parameters

MIB = 2**20
_WORKSPACE_BYTES = 2**30
"""What a rank keeps free on its GPU, beside weights and KV cache, for activations, recorded steps and libraries."""


def cache_blocks(
    cache: CacheConfig, block_bytes: int, ranks: int, device: torch.device, model: Path, dtype: torch.dtype
) -> int:
    """Returns the number of blocks. ``block_bytes`` are those of one block on one of the ``ranks``.

    With ``--gpu-memory-utilization``, the memory of this rank's GPU counts for all. Raises ConfigError if that is given
    for a CPU, or leaves no room.
    """
    share = cache.gpu_memory_utilization
    if not share:
        return cache.kv_cache_mib * MIB // (block_bytes * ranks)
    if device.type != "cuda":
        raise ConfigError(
            "--gpu-memory-utilization is for GPUs, and this engine computes on the CPU: --kv-cache-mib says how much "
            "memory its KV cache takes"
        )
    free, total = torch.cuda.mem_get_info(device)
    weights = parameters(model) * dtype.itemsize // ranks
    return gpu_cache_bytes(share, total, free, weights) // block_bytes


def gpu_cache_bytes(share: float, total: int, free: int, weights: int) -> int:
    """Returns the bytes that the KV cache may take on a GPU of which the engine takes ``share``.

    ``total`` and ``free`` are the GPU's memory before the engine has loaded its ``weights``. Raises ConfigError if
    nothing is left.
    """
    left = math.floor(share * total) - (total - free) - weights - _WORKSPACE_BYTES
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g}: nothing is left for the KV cache. The GPU has {total // MIB} MiB, of "
            f"which {(total - free) // MIB} are in use; the weights take {weights // MIB}, and "
            f"{_WORKSPACE_BYTES // MIB} stay free for computing"
        )
    return left
