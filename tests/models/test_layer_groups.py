"""Tests how a cache's memory is divided among the groups of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import Dtype
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.layer_groups import GroupSize, Load, Place, group_blocks, group_sizes, layer_groups, prompt_bytes
from pdserve.models.rank_cache import rank_sizes
from pdserve.models.tp.shares import Alone
from pdserve.wire.cache_groups import Keep
from tests.models.tiny_families import save_tiny
from tests.tiny_models import WINDOW as TOKENS
from tests.tiny_models import save_tiny_model

MIB = 2**20
BLOCK_SIZE = 16
WHOLE = GroupSize(Keep.ALL, 64 * 1024)
WINDOW = GroupSize(Keep.WINDOW, 64 * 1024, 512)
STATE = GroupSize(Keep.LATEST, MIB)
EMPTY = GroupSize(Keep.ALL, 0)
LOAD = Load(requests=8, step_tokens=256, context=131_072)


def test_one_group_has_all_the_memory() -> None:
    assert group_blocks([WHOLE], BLOCK_SIZE, 100 * MIB + 1, LOAD) == (1600,)


def test_a_model_of_alternating_windows_holds_contexts_of_nearly_twice_the_length() -> None:
    """Half of its layers have a window. Before, all layers kept whole contexts."""
    memory = 2048 * MIB
    before = memory // (WHOLE.block_bytes + WINDOW.block_bytes)
    whole, window = group_blocks([WHOLE, WINDOW], BLOCK_SIZE, memory, LOAD)
    assert whole > 1.9 * before
    # 8 requests of 34 blocks, one step, as much for transfers, and a quarter more for the prefix cache.
    assert window == 723
    assert whole * WHOLE.block_bytes + window * WINDOW.block_bytes <= memory


class Ranks(Alone):
    """The first of some ranks, which computes nothing."""

    def __init__(self, size: int) -> None:
        self.size = size


def test_latents_are_kept_once_for_all_heads_and_on_every_rank(tmp_path: Path) -> None:
    config = read_decoder_config(save_tiny("deepseek-v3", tmp_path))
    (group,) = layer_groups(config).groups
    assert (group.keep, group.layers, group.heads, group.numbers) == (Keep.ALL, 3, 1, 20 + 4)
    (size,) = group_sizes(config, 4, BLOCK_SIZE)
    # One key of each token and layer, which has the value in it.
    assert size.block_bytes == 3 * (20 + 4) * BLOCK_SIZE * 4
    for ranks in (1, 2, 3):
        assert rank_sizes(config, Dtype.FP32, BLOCK_SIZE, Ranks(ranks)) == (size,)


def test_little_memory_is_full_when_contexts_have_four_windows() -> None:
    """Divided evenly, 256 blocks of each, it would hold no more than if all layers kept whole contexts."""
    whole, window = group_blocks([WHOLE, WINDOW], BLOCK_SIZE, 32 * MIB, LOAD)
    assert (whole, window) == (404, 107)
    usual, of_window = 4 * WINDOW.window // BLOCK_SIZE, WINDOW.window // BLOCK_SIZE + 2
    assert whole / usual == pytest.approx(window / of_window, rel=0.01)


@pytest.mark.parametrize("requests", [8, 64, 256])
def test_the_places_of_a_batch_take_no_memory_from_longer_contexts(requests: int) -> None:
    """Five layers of six have a window of 1,024, as those of a Gemma 3: what all places need is more than there is."""
    groups = [GroupSize(Keep.ALL, MIB), GroupSize(Keep.WINDOW, 5 * MIB, 1024)]
    nbytes, load = 48_000 * MIB, replace(LOAD, requests=requests)
    whole, window = group_blocks(groups, BLOCK_SIZE, nbytes, load)
    even = nbytes // (6 * MIB)
    assert whole > 2.5 * even
    assert window // (1024 // BLOCK_SIZE + 2) >= min(requests, 75)


def test_a_context_that_is_asked_for_comes_before_the_places_of_a_batch() -> None:
    asked = replace(LOAD, requests=256, context=4096, asked=4096)
    whole, window = group_blocks([WHOLE, WINDOW], BLOCK_SIZE, 24 * MIB, asked)
    assert whole >= 256
    assert window >= 512 // 16 + 2 + 256 // 16
    whole, _, states = group_blocks([WHOLE, WINDOW, STATE], BLOCK_SIZE, 36 * MIB, asked)
    assert whole >= 256
    assert states >= 4


def test_states_take_what_a_batch_needs_and_a_share_for_checkpoints() -> None:
    whole, states = group_blocks([WHOLE, STATE], BLOCK_SIZE, 1024 * MIB, LOAD)
    needed = 4 * 8 * 5 // 4
    assert states == needed + (1024 - needed) // 4 - 1
    assert whole * WHOLE.block_bytes + states * STATE.block_bytes <= 1024 * MIB
    many = replace(LOAD, requests=1000)
    assert group_blocks([WHOLE, STATE], BLOCK_SIZE, 1024 * MIB, many)[1] >= 512


def test_a_model_of_states_only_counts_positions_without_bytes() -> None:
    empty, states = group_blocks([EMPTY, STATE], BLOCK_SIZE, 1024 * MIB, LOAD)
    assert states == 1023
    assert empty == 2 * 8 * 131_072 // BLOCK_SIZE
    assert group_blocks([EMPTY, STATE], BLOCK_SIZE, 2 * MIB, LOAD)[0] == 0


@given(
    st.lists(st.sampled_from([WINDOW, replace(WINDOW, window=4096), STATE]), max_size=3, unique=True),
    st.sampled_from([WHOLE, EMPTY]),
    st.integers(0, 4096),
    st.integers(1, 300),
    st.integers(1, 4096),
    st.sampled_from([100, 8192, 10**6]),
    st.booleans(),
)
def test_no_division_takes_more_than_there_is(
    bounded: list[GroupSize],
    whole: GroupSize,
    mib: int,
    requests: int,
    step_tokens: int,
    context: int,
    asked: bool,
) -> None:
    if not bounded and not whole.block_bytes:
        return
    load = Load(requests, step_tokens, context, context if asked else 0)
    groups = [whole, *bounded]
    counts = group_blocks(groups, BLOCK_SIZE, mib * MIB, load)
    assert min(counts) >= 0
    if counts[0]:
        assert sum(group.block_bytes * count for group, count in zip(groups, counts, strict=True)) <= mib * MIB
    if whole.block_bytes:
        for group, count in zip(groups, counts, strict=True):
            assert group.keep is not Keep.WINDOW or count <= counts[0] or not counts[0]


@given(
    st.sampled_from([16, 64, 320]),
    st.sampled_from([16, 64, 320]),
    st.integers(1, 64 * 1024),
    st.integers(1, 8192),
    st.integers(0, 2048),
)
def test_a_window_holds_the_longest_context_or_the_largest_step(
    whole_kib: int, window_kib: int, kib: int, step_tokens: int, asked: int
) -> None:
    """A request that no window has room for would be admitted again and again."""
    window = GroupSize(Keep.WINDOW, window_kib * 1024, 512)
    load = Load(32, step_tokens, 32_768, asked)
    first, count = group_blocks([GroupSize(Keep.ALL, whole_kib * 1024), window], BLOCK_SIZE, kib * 1024, load)
    assert count >= min(first, 512 // BLOCK_SIZE + 2 + -(-step_tokens // BLOCK_SIZE) + 1)


@pytest.mark.parametrize("case", ["gemma2", "ministral", "cohere2", "exaone4"])
def test_layers_with_a_window_are_a_group_of_their_own(tmp_path: Path, case: str) -> None:
    config = read_decoder_config(save_tiny(case, tmp_path))
    found = layer_groups(config)
    assert [group.keep for group in found.groups] == [Keep.ALL, Keep.WINDOW]
    assert found.groups[1].window in config.windows
    for window, place in zip(config.windows, found.attention, strict=True):
        assert place is not None
        assert place.group == (window is not None)
    assert sum(group.layers for group in found.groups) == config.num_layers
    whole, windowed = group_sizes(config, 2, BLOCK_SIZE)
    assert prompt_bytes([whole, windowed], BLOCK_SIZE) == 2 * windowed.block_bytes
    assert rank_sizes(config, Dtype.BF16, BLOCK_SIZE) == (whole, windowed)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "fallback"])
def test_a_model_whose_layers_are_all_alike_has_one_group(tmp_path: Path, family: str) -> None:
    name = {"fallback": "mellum"}.get(family, family)
    (whole,) = layer_groups(read_decoder_config(save_tiny_model(name, tmp_path))).groups
    assert whole.keep is Keep.ALL


def with_heads(config: FamilyConfig, index: int, **changes: Any) -> FamilyConfig:
    """Returns the configuration with other settings of one layer's attention."""
    layers = list(config.recipe.layers)
    attention = layers[index].attention
    assert attention is not None
    layers[index] = replace(layers[index], attention=replace(attention, **changes))
    return replace(config, recipe=replace(config.recipe, layers=tuple(layers)))


def test_layers_with_other_heads_are_a_group_of_their_own(tmp_path: Path) -> None:
    config = read_family_config(save_tiny("ministral", tmp_path))
    assert [window is None for window in config.windows] == [False, True, False]
    wide = with_heads(config, 2, head_dim=2 * config.head_dim, kv_heads=1)
    found = layer_groups(wide)
    assert [(group.keep, group.layers, group.heads, group.numbers) for group in found.groups] == [
        (Keep.ALL, 1, config.kv_heads, config.head_dim),
        (Keep.WINDOW, 1, config.kv_heads, config.head_dim),
        (Keep.WINDOW, 1, 1, 2 * config.head_dim),
    ]
    assert len({group.name for group in found.groups}) == 3
    shared = layer_groups(with_heads(config, 2, kv_from=0))
    assert shared.attention[2] == shared.attention[0] == Place(1, 0)
    assert [group.layers for group in shared.groups] == [1, 1]


def test_layers_that_see_everything_have_the_same_heads(tmp_path: Path) -> None:
    config = read_family_config(save_tiny_model("llama", tmp_path))
    with pytest.raises(ModelError, match=r"whole contexts have different heads: 6, and 2 of 10 for KV"):
        layer_groups(with_heads(config, 1, kv_heads=1))


def test_a_window_that_no_context_fills_is_none_where_heads_are_alike(tmp_path: Path) -> None:
    window = TOKENS
    alike = replace(read_family_config(save_tiny("ministral", tmp_path / "alike")), max_positions=window)
    assert [group.keep for group in layer_groups(alike).groups] == [Keep.ALL]
    unlike = replace(read_family_config(save_tiny("gemma4", tmp_path / "unlike")), max_positions=window)
    assert [(group.keep, group.heads, group.numbers) for group in layer_groups(unlike).groups] == [
        (Keep.ALL, 1, 16),
        (Keep.WINDOW, 2, 10),
    ]
