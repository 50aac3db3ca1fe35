"""Tests of the size of the KV cache."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pdserve.config import (
    CacheConfig,
    CpuConfig,
    CpuKernels,
    Dtype,
    EngineConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    TransferConfig,
)
from pdserve.engine.kv_cache.cache_size import cache_bytes, context_length, gpu_cache_bytes, with_sizes
from pdserve.errors import ConfigError
from pdserve.machine.memory import MIB
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.weight_form import draft_model_size, parameters
from pdserve.models.rank_cache import rank_sizes
from pdserve.wire.discovery import Role

GIB = 2**30
CPU = torch.device("cpu")


def test_ranks_share_the_memory_that_is_given() -> None:
    cache = CacheConfig(kv_cache_mib=64)
    assert cache_bytes(cache, 2, CPU, Path(), ModelConfig(), GIB) == 32 * MIB


def test_a_share_of_a_gpu_is_not_for_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization is for GPUs, .* --kv-cache-mib"):
        cache_bytes(CacheConfig(gpu_memory_utilization=0.9), 1, CPU, Path(), ModelConfig(), GIB)


def test_the_cache_takes_what_weights_and_others_leave() -> None:
    assert gpu_cache_bytes(0.5, 80 * GIB, 80 * GIB, 16 * GIB, GIB) == 23 * GIB
    assert gpu_cache_bytes(0.5, 80 * GIB, 70 * GIB, 16 * GIB, GIB) == 23 * GIB
    # A tenth of the memory stays free, whoever has the rest.
    assert gpu_cache_bytes(0.5, 80 * GIB, 40 * GIB, 16 * GIB, GIB) == 15 * GIB


def test_a_gpu_without_room_is_told_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"has 81920 MiB, of which 0 are in use; the weights take 65536"):
        gpu_cache_bytes(0.8, 80 * GIB, 80 * GIB, 64 * GIB, GIB)


def test_the_numbers_of_a_model_are_counted(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert parameters(tiny_model) == sum(tensor.numel() for tensor in dict(model.named_parameters()).values())


def test_a_draft_model_leaves_less_of_a_cpus_memory_for_the_cache(tiny_model: Path) -> None:
    """As much less as the check before the start counts."""
    decoder, size = read_decoder_config(tiny_model), CacheConfig().block_size
    groups = rank_sizes(decoder, Dtype.BF16, size)

    def mib(draft_model: str) -> int:
        config = EngineConfig(
            role=Role.MIXED,
            boot_id=bytes(16),
            secret=b"",
            model_dir=str(tiny_model),
            cache_dir="",
            model=ModelConfig(),
            cache=CacheConfig(node_memory_mib=1536),
            scheduler=SchedulerConfig(draft_model=draft_model),
            transfer=TransferConfig(),
            cpu=CpuConfig(),
            log=LogConfig(),
            parallel=ParallelConfig(),
            has_peers=False,
        )
        return with_sizes(config, decoder, groups, 1, CPU).cache.kv_cache_mib

    held = draft_model_size(tiny_model, decoder, ModelConfig(), CpuKernels.AUTO, size)
    assert mib("") - mib(str(tiny_model)) == pytest.approx(held.total / 2 / MIB, abs=1)


def test_a_cache_that_is_too_small_for_the_models_context_says_what_it_would_take(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = CacheConfig(kv_cache_mib=8)
    with caplog.at_level(logging.WARNING):
        assert context_length(cache, 0, 1000, 63, MIB) == 1000
        assert context_length(cache, 500, 1000, 40, MIB) == 500
        assert not caplog.messages
        assert context_length(cache, 0, 1000, 8, MIB) == 128
    (warning,) = caplog.messages
    assert "(--kv-cache-mib 8) holds 128 tokens" in warning
    assert "the model knows 1000: 1000 take 63 MiB, so raise --kv-cache-mib, or say --max-model-len 128" in warning


@pytest.mark.parametrize(
    ("cache", "asked", "blocks", "match"),
    [
        (CacheConfig(), 2000, 100, "the model knows only 1000 positions"),
        (CacheConfig(kv_cache_mib=8), 900, 8, r"kv-cache-mib 8\) holds 128 .*len 900\): 900 take 57 MiB"),
        (CacheConfig(gpu_memory_utilization=0.5), 900, 8, r"memory-utilization 0\.5\) holds 128 .*: 900 take 57 MiB"),
        (CacheConfig(kv_cache_mib=8), 0, 0, "holds 0 tokens"),
    ],
)
def test_a_context_that_cannot_be_is_refused(cache: CacheConfig, asked: int, blocks: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        context_length(cache, asked, 1000, blocks, MIB)
