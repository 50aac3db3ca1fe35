"""Gives an engine the sizes that no setting gives, by what its device has when it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from pdserve.config import EngineConfig, SchedulerConfig
from pdserve.engine.kv_cache.workspace import workspace_bytes
from pdserve.machine.memory import available_memory
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.checkpoint.weight_form import weight_bytes
from pdserve.models.sizes import MIB, ModelSize, cpu_cache, cpu_scheduler, gpu_budget, gpu_scheduler, gpu_share
from pdserve_kernels.kv_layout import KvLayout


def with_sizes(
    config: EngineConfig, decoder: DecoderConfig, layout: KvLayout, ranks: int, device: torch.device
) -> EngineConfig:
    """Returns ``config`` with a KV cache, step tokens and places for ``device``, whose rank's cache has ``layout``.

    Raises ConfigError if the memory is too small for what is asked for.
    """
    block_bytes = layout.block_bytes
    if device.type == "cuda":
        return _for_gpu(config, decoder, layout, ranks, device)
    model = ModelSize(
        weights=weight_bytes(Path(config.model_dir), config.model, config.cpu.kernels),
        token=block_bytes * ranks // layout.block_size,
        positions=decoder.max_positions,
    )
    memory = config.cache.node_memory_mib * MIB or available_memory()
    cache = cpu_cache(model, config.cache, config.model.max_model_len, memory, ranks)
    if cache.node_memory_mib:
        # Who gives the sizes for a CPU as well as for a GPU means those of the device that is here.
        cache = replace(cache, gpu_memory_utilization=0.0)
    cores = torch.get_num_threads() * ranks
    return replace(
        config, cache=cache, scheduler=cpu_scheduler(model, config.scheduler, cache.kv_cache_mib * MIB, cores)
    )


def _for_gpu(
    config: EngineConfig, decoder: DecoderConfig, layout: KvLayout, ranks: int, device: torch.device
) -> EngineConfig:
    share = gpu_share(config.cache)
    free, total = torch.cuda.mem_get_info(device)
    weights = weight_bytes(Path(config.model_dir), config.model, config.cpu.kernels, in_blocks=False) // ranks
    given = config.cache.kv_cache_mib * MIB // ranks

    def left_after(scheduler: SchedulerConfig) -> int:
        """Returns the bytes of the KV cache with steps of this size."""
        workspace = workspace_bytes(decoder, scheduler, layout.dtype, ranks, layout.block_bytes)
        if not share:
            return min(given, free - weights - workspace)
        return gpu_budget(share, total, free) - weights - workspace

    token_bytes = layout.block_bytes // layout.block_size
    scheduler = gpu_scheduler(config.scheduler, token_bytes, left_after)
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=share), scheduler=scheduler)
