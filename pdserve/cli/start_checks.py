"""Finds out before anything is started whether the model, and the context that is asked for, fit this machine.

It reads the headers of the model's files alone, and does not load torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pdserve.cli.up.kernel_compiler import may_have_gpu
from pdserve.config import CacheConfig, CpuKernels, ModelConfig, NodeConfig
from pdserve.errors import ConfigError
from pdserve.machine.memory import MIB, available_memory
from pdserve.models.checkpoint.config_reading import has_own_decoder, read_decoder_config
from pdserve.models.checkpoint.gguf.file import forget_gguf
from pdserve.models.checkpoint.weight_form import cache_item_bytes, draft_model_size, model_size
from pdserve.models.layer_groups import Load, check_kv_dtype, group_blocks, group_sizes
from pdserve.models.sizes import GPU_ONLY, check_weights, cpu_cache, fitting_context


def check_model(
    path: Path,
    model: ModelConfig,
    cache: CacheConfig,
    kernels: CpuKernels,
    ranks: int,
    memory: int,
    part: int,
    draft_model: str = "",
) -> None:
    """Raises ConfigError or ModelError if a node on a CPU cannot have the model, or the context that is asked for.

    ``memory`` is what this machine has left, and ``part`` what each node takes of it, in bytes; 0 if nobody knows.
    ``draft_model`` is the path of the model that drafts for it, if there is one. Models that only transformers can read
    are left to the engine.
    """
    if cache.gpu_memory_utilization and not cache.node_memory_mib:
        raise ConfigError(GPU_ONLY)
    cache = replace(cache, gpu_memory_utilization=0.0)
    if not has_own_decoder(path):
        return
    decoder = read_decoder_config(path)
    check_kv_dtype(decoder, cache.kv_cache_dtype)
    draft, other = 0, Path(draft_model)
    if draft_model and has_own_decoder(other):
        draft = draft_model_size(other, read_decoder_config(other), model, kernels, cache.block_size).total
    size = model_size(path, decoder, model, kernels, cache.kv_cache_dtype, draft)
    check_weights(size, memory, ranks)
    sized = cpu_cache(size, cache, model.max_model_len, part, ranks)
    groups = group_sizes(decoder, cache_item_bytes(model.dtype, cache.kv_cache_dtype), cache.block_size)
    # No cache with more places or larger steps holds a longer context.
    load = Load(1, 1, model.max_model_len or decoder.max_positions, model.max_model_len)
    blocks, *_ = group_blocks(groups, cache.block_size, sized.kv_cache_mib * MIB, load)
    beside = size.context_bytes(load.context) - load.context * size.token
    fitting_context(sized, model.max_model_len, decoder.max_positions, blocks, groups[0].block_bytes, beside)


def check_node(config: NodeConfig, model: Path) -> None:
    """Raises ConfigError or ModelError if a node with these settings cannot have the model, as ``check_model``."""
    if may_have_gpu(config):
        check_positions(model, config.model)
        return
    memory = available_memory()
    part = config.cache.node_memory_mib * MIB or memory
    ranks = config.parallel.tensor_parallel_size
    draft_model = config.scheduler.used_draft_model
    check_model(model, config.model, config.cache, config.cpu.kernels, ranks, memory, part, draft_model)
    # It has all tokens of a tokenizer, for which this process has no use.
    forget_gguf()


def check_positions(path: Path, model: ModelConfig) -> None:
    """Raises ConfigError if more tokens are asked for than the model knows, on whatever device."""
    if model.max_model_len and has_own_decoder(path) and model.max_model_len > read_decoder_config(path).max_positions:
        raise ConfigError(
            f"--max-model-len is {model.max_model_len}, but the model knows only "
            f"{read_decoder_config(path).max_positions} positions"
        )
