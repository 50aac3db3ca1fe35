"""How many blocks the KV cache of an engine has, and how long a context they hold."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from pdserve.config import CacheConfig
from pdserve.errors import ConfigError
from pdserve.models.checkpoint.weights import parameters
from pdserve.models.sizes import GPU_ONLY, MIB, fitting_context, gpu_budget

log = logging.getLogger(__name__)


def cache_blocks(
    cache: CacheConfig,
    block_bytes: int,
    ranks: int,
    device: torch.device,
    model: Path,
    dtype: torch.dtype,
    workspace: int,
) -> int:
    """Returns the number of blocks. ``block_bytes`` are those of one block on one of the ``ranks``.

    ``workspace`` are the bytes that a rank needs for computing on a GPU.

    With ``--gpu-memory-utilization``, the memory of this rank's GPU counts for all. Raises ConfigError if that is given
    for a CPU, or leaves no room.
    """
    share = cache.gpu_memory_utilization
    if not share:
        return cache.kv_cache_mib * MIB // (block_bytes * ranks)
    if device.type != "cuda":
        raise ConfigError(GPU_ONLY)
    free, total = torch.cuda.mem_get_info(device)
    weights = parameters(model) * dtype.itemsize // ranks
    return gpu_cache_bytes(share, total, free, weights, workspace) // block_bytes


def gpu_cache_bytes(share: float, total: int, free: int, weights: int, workspace: int) -> int:
    """Returns the bytes that the KV cache may take on a GPU of which the engine takes ``share``.

    ``total`` and ``free`` are the GPU's memory before the engine has loaded its ``weights``; ``workspace`` stays free
    for computing. Raises ConfigError if nothing is left.
    """
    left = gpu_budget(share, total, free) - weights - workspace
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g}: nothing is left for the KV cache. The GPU has {total // MIB} MiB, of "
            f"which {(total - free) // MIB} are in use; the weights take {weights // MIB}, and "
            f"{workspace // MIB} stay free for computing (less with lower --max-num-batched-tokens or --max-num-seqs)"
        )
    return left


def context_length(cache: CacheConfig, asked: int, max_positions: int, num_blocks: int, block_bytes: int) -> int:
    """Returns how many tokens a prompt and its output may have together, and warns if that is less than the model's.

    ``asked`` is ``--max-model-len``, and ``block_bytes`` are those of one block on all ranks. Raises ConfigError if the
    model knows fewer tokens than are asked for, or the cache holds fewer.
    """
    context, cut = fitting_context(cache, asked, max_positions, num_blocks, block_bytes)
    if cut:
        log.warning("%s", cut)
    return context
