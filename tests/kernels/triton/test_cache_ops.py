"""Tests the ops that write into the cache's blocks and copy them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import HeadNorms
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton.cache_ops import gather_blocks, kv_write, scatter_blocks, store_projected
from tests.kernels import shared_tables
from tests.kernels.shared_tables import every_number
from tests.kernels.triton.device import DEVICE, DTYPES, SEEDS, assert_near, examples

NUM_BLOCKS = 12


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    return KvLayout(
        kv_heads=draw(st.integers(1, 5)),
        num_layers=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from([1, 2, 3, 16, 64])),
        head_dim=draw(st.sampled_from([2, 10, 32, 80])),
        dtype=draw(DTYPES),
        fp8=draw(st.booleans()),
    )


def random_cache(layout: KvLayout) -> torch.Tensor:
    return shared_tables.random_cache(layout, NUM_BLOCKS)


@settings(max_examples=examples(30), deadline=None)
@given(layouts(), st.sampled_from([0, 0, 2]), st.data(), SEEDS)
def test_kv_write(layout: KvLayout, shared: int, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    layout = replace(layout, shared_channels=shared)
    slots = data.draw(
        st.lists(st.integers(0, NUM_BLOCKS * layout.block_size - 1), unique=True, max_size=8), label="slots"
    )
    layer = data.draw(st.integers(0, layout.num_layers - 1), label="layer")
    cache = random_cache(layout)
    # Keys and values are views into one projection, as in a decoder.
    projection = torch.randn(len(slots), 2 * layout.kv_heads + 1, layout.head_dim).to(layout.dtype)
    got, moved = cache.to(DEVICE, copy=True), projection.to(DEVICE)
    kv_write(
        got,
        layout,
        layer,
        torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        moved[:, : layout.kv_heads],
        moved[:, layout.kv_heads : -1],
    )
    key, value = projection[:, : layout.kv_heads], projection[:, layout.kv_heads : -1]
    reference.kv_write(cache, layout, layer, torch.tensor(slots, dtype=torch.int64), key, value)
    assert torch.equal(got.cpu(), cache)


@settings(max_examples=examples(30), deadline=None)
@given(layouts(), st.integers(1, 9), st.integers(0, 6), st.booleans(), SEEDS)
def test_projection(layout: KvLayout, heads: int, tokens: int, normalised: bool, seed: int) -> None:
    torch.manual_seed(seed)
    dtype, head_dim, kv_heads = layout.dtype, layout.head_dim, layout.kv_heads
    cache = random_cache(layout)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.rand(tokens, head_dim // 2) * 100
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = HeadNorms(torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-5) if normalised else None
    moved_norms = norms and HeadNorms(norms.query.to(DEVICE), norms.key.to(DEVICE), norms.eps)
    slots = torch.randperm(NUM_BLOCKS * layout.block_size)[:tokens].to(torch.int32)
    got = cache.to(DEVICE, copy=True)
    query = store_projected(
        qkv.to(DEVICE),
        cos.to(DEVICE),
        sin.to(DEVICE),
        moved_norms,
        got,
        layout,
        layout.num_layers - 1,
        slots.to(DEVICE),
    )
    wanted, (key, value) = reference.projected(qkv, kv_heads, cos, sin, norms)
    reference.kv_write(cache, layout, layout.num_layers - 1, slots, key, value)
    assert_near(query, wanted, 4)
    if layout.fp8:
        # A key that is rounded to the next number of its dtype may be rounded to the next one of e4m3.
        seen, known = (reference.stored(blocks, layout).float() for blocks in (got.cpu(), cache))
        torch.testing.assert_close(seen, known, rtol=2**-3, atol=2**-6)
        assert torch.equal(seen[..., 1, :, :], known[..., 1, :, :])
        return
    assert_near(got, cache, 4)


@pytest.mark.parametrize("one_in", [64, pytest.param(16, marks=pytest.mark.nightly)])
def test_every_number_is_rounded_alike_in_fp8(one_in: int) -> None:
    """The interpreter, whose programs run one after another, takes one row in so many."""
    for dtype in (torch.float32, torch.bfloat16):
        key = every_number(dtype)[:: 1 if DEVICE.type == "cuda" else one_in]
        layout = KvLayout(1, 1, 16, 64, dtype, fp8=True)
        blocks = -(-len(key) // 16)
        got, wanted = layout.allocate(blocks, DEVICE), layout.allocate(blocks, torch.device("cpu"))
        heads, slots = key.unsqueeze(1), torch.arange(len(key))
        kv_write(got, layout, 0, slots.to(DEVICE, torch.int32), heads.to(DEVICE), heads.flip(0).to(DEVICE))
        reference.kv_write(wanted, layout, 0, slots, heads, heads.flip(0))
        assert torch.equal(got.cpu(), wanted)


def test_a_projection_of_padding_is_stored_nowhere() -> None:
    layout = KvLayout(2, 1, 4, 8, torch.float32)
    cache = layout.allocate(3, DEVICE)
    angles = torch.zeros(2, 4, device=DEVICE)
    slots = torch.tensor([-1, 5], dtype=torch.int32, device=DEVICE)
    store_projected(torch.ones(2, 6, 8, device=DEVICE), angles + 1, angles, None, cache, layout, 0, slots)
    assert int(cache.sum()) == int(cache[1, :, 0, :, 1].sum()) == 2 * 2 * 8


def test_padding_is_written_nowhere() -> None:
    layout = KvLayout(2, 2, 4, 8, torch.float32)
    cache = torch.zeros_like(layout.allocate(3, DEVICE))
    key = torch.ones(2, 2, 8, device=DEVICE)
    kv_write(cache, layout, 0, torch.tensor([-1, 5], dtype=torch.int32, device=DEVICE), key, key)
    assert int(cache.sum()) == int(cache[1, :, 0, :, 1].sum()) == 2 * 2 * 8


@settings(max_examples=examples(30), deadline=None)
@given(layouts(), st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=5), SEEDS)
def test_gather_and_scatter(layout: KvLayout, blocks: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    cache, other = random_cache(layout), random_cache(layout)
    ids = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    # The buffer is longer than needed, like a staging buffer, which is made once for the largest transfer.
    staged = torch.zeros(len(blocks) + 1, *cache.shape[1:], dtype=layout.element, device=DEVICE)
    gather_blocks(cache.to(DEVICE), ids, staged)
    wanted = reference.gather_blocks(cache, torch.tensor(blocks, dtype=torch.int64))
    assert torch.equal(staged[:-1].cpu(), wanted)
    assert not staged[-1].any()
    target = other.to(DEVICE, copy=True)
    scatter_blocks(target, ids, staged)
    reference.scatter_blocks(other, torch.tensor(blocks, dtype=torch.int64), wanted)
    assert torch.equal(target.cpu(), other)
