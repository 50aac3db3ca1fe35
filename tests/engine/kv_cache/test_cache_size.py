"""Tests of the size of the KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.config import CacheConfig
from pdserve.engine.kv_cache.cache_size import cache_blocks, gpu_cache_bytes
from pdserve.errors import ConfigError
from pdserve.models.checkpoint.weights import parameters

GIB = 2**30
CPU = torch.device("cpu")


def test_ranks_share_the_memory_that_is_given() -> None:
    cache = CacheConfig(kv_cache_mib=64)
    assert cache_blocks(cache, 2**20, 2, CPU, Path(), torch.bfloat16) == 32


def test_a_share_of_a_gpu_is_not_for_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization is for GPUs, .* --kv-cache-mib"):
        cache_blocks(CacheConfig(gpu_memory_utilization=0.9), 2**20, 1, CPU, Path(), torch.bfloat16)


def test_the_cache_takes_what_weights_and_others_leave() -> None:
    assert gpu_cache_bytes(0.5, 80 * GIB, 80 * GIB, 16 * GIB) == 23 * GIB
    assert gpu_cache_bytes(0.5, 80 * GIB, 70 * GIB, 16 * GIB) == 13 * GIB


def test_a_gpu_without_room_is_told_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"has 81920 MiB, of which 0 are in use; the weights take 65536"):
        gpu_cache_bytes(0.8, 80 * GIB, 80 * GIB, 64 * GIB)


def test_the_numbers_of_a_model_are_counted(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert parameters(tiny_model) == sum(tensor.numel() for tensor in dict(model.named_parameters()).values())
