"""Tests of the sizes that a node chooses where no setting gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import CacheConfig, SchedulerConfig
from pdserve.errors import ConfigError
from pdserve.machine.memory import MIB
from pdserve.models.sizes import (
    GPU_SHARE,
    LEAST_CACHE_MIB,
    PROCESS_BYTES,
    USUAL_CACHE_BYTES,
    ModelSize,
    check_weights,
    cpu_cache,
    cpu_scheduler,
    gpu_budget,
    gpu_scheduler,
    gpu_share,
)

GIB = 2**30
SMALL = ModelSize(weights=GIB, token=2**15, positions=8192)
"""Its context takes 256 MiB."""
LONG = ModelSize(weights=GIB, token=2**17, positions=131_072)
"""Its context takes 16 GiB."""


def cpu_mib(model: ModelSize, memory: int, max_model_len: int = 0, ranks: int = 1, kv_cache_mib: int = 0) -> int:
    return cpu_cache(model, CacheConfig(kv_cache_mib=kv_cache_mib), max_model_len, memory, ranks).kv_cache_mib


def test_a_cpus_cache_takes_half_of_what_weights_and_processes_leave() -> None:
    assert cpu_mib(SMALL, 4 * GIB) == (3 * GIB - PROCESS_BYTES) // 2 // MIB
    assert cpu_mib(SMALL, 4 * GIB, ranks=2) == (3 * GIB - 2 * PROCESS_BYTES) // 2 // MIB


def test_it_is_no_larger_than_usual_unless_one_context_is() -> None:
    assert cpu_mib(SMALL, 16 * GIB) == USUAL_CACHE_BYTES // MIB
    assert cpu_mib(SMALL, 65 * GIB + PROCESS_BYTES) == 4 * 1024
    assert cpu_mib(LONG, 64 * GIB) == 16 * 1024
    assert cpu_mib(LONG, 16 * GIB) == (15 * GIB - PROCESS_BYTES) // 2 // MIB


def test_a_machine_with_little_memory_or_none_that_is_known_still_has_a_cache() -> None:
    assert cpu_mib(SMALL, GIB // 2) == LEAST_CACHE_MIB
    assert cpu_mib(SMALL, 0) == USUAL_CACHE_BYTES // 2 // MIB


def test_a_size_that_is_given_is_not_changed() -> None:
    assert cpu_mib(SMALL, 64 * GIB, kv_cache_mib=7) == 7
    assert cpu_scheduler(SMALL, SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=99), GIB, 64) == (
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=99)
    )


def test_a_context_that_is_asked_for_gets_what_it_takes_up_to_all_that_is_left() -> None:
    # 65,536 tokens take 8 GiB.
    assert cpu_mib(LONG, 12 * GIB, max_model_len=65_536) >= 8 * 1024
    with pytest.raises(ConfigError, match=r"--max-model-len 65536 takes 8192 MiB of KV cache, and 6656 MiB are left"):
        cpu_mib(LONG, 8 * GIB, max_model_len=65_536)
    assert cpu_mib(LONG, 8 * GIB, max_model_len=65_536, kv_cache_mib=9000) == 9000


def test_a_context_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model knows only 8192 positions"):
        cpu_mib(SMALL, 64 * GIB, max_model_len=9000)


@pytest.mark.parametrize(("cores", "tokens"), [(1, 256), (8, 256), (16, 512), (64, 2048), (200, 2048)])
def test_a_cpus_steps_grow_with_its_cores(cores: int, tokens: int) -> None:
    sized = cpu_scheduler(SMALL, SchedulerConfig(), 4 * GIB, cores)
    assert (sized.max_num_batched_tokens, sized.max_num_seqs) == (tokens, min(tokens // 4, 256))


def test_a_cpus_places_follow_its_cache() -> None:
    assert cpu_scheduler(SMALL, SchedulerConfig(), 20 * 128 * SMALL.token, 1).max_num_seqs == 20
    assert cpu_scheduler(SMALL, SchedulerConfig(), MIB, 1).max_num_seqs == 16
    assert cpu_scheduler(SMALL, SchedulerConfig(max_num_batched_tokens=2), GIB, 1).max_num_seqs == 1
    assert cpu_scheduler(SMALL, SchedulerConfig(max_num_seqs=640), GIB, 1).max_num_batched_tokens == 1280


def test_weights_that_cannot_fit_are_told_with_numbers() -> None:
    check_weights(SMALL, 2 * GIB, 1)
    check_weights(SMALL, 0, 1)
    with pytest.raises(ConfigError, match=r"too small for this model: its weights take 1024 MiB .* 1024 MiB are avail"):
        check_weights(SMALL, GIB, 1)


def test_a_draft_model_takes_from_the_same_memory() -> None:
    drafted = replace(SMALL, draft=3 * GIB)
    check_weights(SMALL, 4 * GIB, 1)
    with pytest.raises(ConfigError, match="its weights take 1024 MiB, the draft model 3072 and the node's processes"):
        check_weights(drafted, 4 * GIB, 1)
    assert cpu_cache(drafted, CacheConfig(), 0, 64 * GIB, 1) == cpu_cache(SMALL, CacheConfig(), 0, 61 * GIB, 1)
    with pytest.raises(ConfigError, match="the weights take 1024, the draft model 3072"):
        cpu_cache(drafted, CacheConfig(), SMALL.positions, 9 * GIB // 2, 1)


def test_a_gpu_gives_nine_tenths_unless_settings_say_otherwise() -> None:
    assert gpu_share(CacheConfig()) == GPU_SHARE
    assert gpu_share(CacheConfig(gpu_memory_utilization=0.3, kv_cache_mib=9)) == 0.3
    assert gpu_share(CacheConfig(kv_cache_mib=9)) == 0.0


def test_nodes_that_share_a_gpu_each_get_their_part_whoever_is_first() -> None:
    assert gpu_budget(0.45, 80 * GIB, 80 * GIB) == gpu_budget(0.45, 80 * GIB, 44 * GIB) == 36 * GIB
    assert gpu_budget(0.95, 80 * GIB, 80 * GIB) == 76 * GIB
    assert gpu_budget(0.9, 80 * GIB, 20 * GIB) == 12 * GIB


def left_of(memory: int, token: int = 10**5, place: int = 2 * 10**6) -> Callable[[SchedulerConfig], int]:
    return lambda sized: memory - sized.max_num_batched_tokens * token - sized.max_num_seqs * place


def gpu_sizes(memory: int, token_bytes: int = 2**17, *, tokens: int = 0, places: int = 0) -> tuple[int, int]:
    asked = SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=tokens)
    sized = gpu_scheduler(asked, token_bytes, left_of(memory))
    return sized.max_num_batched_tokens, sized.max_num_seqs


def test_a_large_gpu_has_the_largest_steps_and_all_places() -> None:
    assert gpu_sizes(60 * GIB) == (8192, 256)


def test_a_small_gpu_has_fewer_places_and_then_smaller_steps() -> None:
    assert gpu_sizes(5 * GIB) == (8192, 64)
    assert gpu_sizes(3 * GIB) == (8192, 64)
    assert gpu_sizes(GIB) == (2048, 16)
    assert gpu_sizes(0) == (512, 16)


def test_on_a_gpu_too_sizes_that_are_given_are_not_changed() -> None:
    assert gpu_sizes(0, tokens=4096, places=1000) == (4096, 1000)
    assert gpu_sizes(60 * GIB, tokens=64) == (64, 32)
    assert gpu_sizes(600 * GIB, places=6000) == (12_000, 6000)


@given(
    memory=st.integers(-GIB, 200 * GIB),
    token_bytes=st.integers(1, 2**20),
    tokens=st.integers(0, 20_000),
    places=st.integers(0, 5000),
)
def test_chosen_sizes_always_fit_each_other(memory: int, token_bytes: int, tokens: int, places: int) -> None:
    if tokens and tokens < 2 * max(1, places):
        return  # --max-num-batched-tokens refuses that.
    asked = SchedulerConfig(max_num_seqs=places, max_num_batched_tokens=tokens)
    model = ModelSize(1, token_bytes, 1000)
    for sized in (
        gpu_scheduler(asked, token_bytes, left_of(memory)),
        cpu_scheduler(model, asked, max(1, memory), 1 + tokens % 300),
    ):
        assert sized.max_num_seqs >= 1
        assert sized.max_num_batched_tokens >= 2 * sized.max_num_seqs
        assert tokens in (0, sized.max_num_batched_tokens)
        assert places in (0, sized.max_num_seqs)
