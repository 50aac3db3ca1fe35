"""Tests each CPU op against its definition, with random shapes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.cpu.torch_kernels import DecodeAttention, KvWrite, PackedLinear, PrefillAttention
from pdserve_kernels.kv_layout import KvLayout
from tests.examples import examples

NUM_BLOCKS = 24
CPU = torch.device("cpu")
SCALES = st.sampled_from([0.2, 1.0])
WINDOWS = st.none() | st.integers(1, 30)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    return KvLayout(
        kv_heads=draw(st.integers(1, 3)),
        num_layers=draw(st.integers(1, 3)),
        block_size=draw(st.sampled_from([1, 2, 4, 16])),
        head_dim=draw(st.sampled_from([2, 8, 32])),
        dtype=torch.float32,
    )


def random_cache(layout: KvLayout) -> torch.Tensor:
    return torch.randn_like(layout.allocate(NUM_BLOCKS, CPU))


@settings(max_examples=examples(60))
@given(layouts(), st.integers(1, 3), st.lists(st.integers(1, 40), min_size=1, max_size=4), SCALES, WINDOWS, SEEDS)
def test_decode_attention(
    layout: KvLayout, group: int, lengths: list[int], scale: float, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    cache = random_cache(layout)
    lengths = [min(length, 6 * layout.block_size) for length in lengths]
    order = torch.randperm(NUM_BLOCKS).tolist()
    tables = [order[6 * i : 6 * i + 6] for i in range(len(lengths))]
    query = torch.randn(len(lengths), layout.kv_heads * group, layout.head_dim)
    rows = [AttentionRow(1, length, table) for length, table in zip(lengths, tables, strict=True)]
    attend = DecodeAttention(layout, cache, rows, layout.kv_heads * group, scale)
    for layer in range(layout.num_layers):
        got = attend(layer, query, window)
        for i, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            blocks = table[: -(-length // layout.block_size)]
            wanted = reference.paged_attention(query[i : i + 1], cache, layout, layer, blocks, length, scale, window)
            torch.testing.assert_close(got[i : i + 1], wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=examples(60))
@given(layouts(), st.integers(1, 3), st.integers(1, 24), st.integers(0, 24), SCALES, WINDOWS, SEEDS)
def test_prefill_attention(
    layout: KvLayout, group: int, new: int, before: int, scale: float, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    cache = random_cache(layout)
    capacity = NUM_BLOCKS * layout.block_size
    new = min(new, capacity)
    context = min(new + before, capacity)
    blocks = torch.randperm(NUM_BLOCKS)[: -(-context // layout.block_size)].tolist()
    query = torch.randn(new, layout.kv_heads * group, layout.head_dim)
    attend = PrefillAttention(layout, cache, AttentionRow(new, context, blocks), layout.kv_heads * group, scale)
    for layer in range(layout.num_layers):
        wanted = reference.paged_attention(query, cache, layout, layer, blocks, context, scale, window)
        torch.testing.assert_close(attend(layer, query, window), wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=examples(60))
@given(layouts(), st.data())
def test_kv_write(layout: KvLayout, data: st.DataObject) -> None:
    slots = data.draw(
        st.lists(st.integers(0, NUM_BLOCKS * layout.block_size - 1), unique=True, min_size=1, max_size=20)
    )
    layer = data.draw(st.integers(0, layout.num_layers - 1))
    key_value = torch.randn(2, len(slots), layout.kv_heads, layout.head_dim)
    got, wanted = layout.allocate(NUM_BLOCKS, CPU), layout.allocate(NUM_BLOCKS, CPU)
    KvWrite(layout, got, torch.tensor(slots))(layer, key_value)
    reference.kv_write(wanted, layout, layer, torch.tensor(slots), key_value[0], key_value[1])
    assert torch.equal(got, wanted)


@settings(max_examples=examples(30))
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.sampled_from(["bf16", "fp32"]))
def test_linear(rows: int, inner: int, outer: int, biased: bool, dtype: str) -> None:
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    x, weight = torch.randn(rows, inner).to(kind), torch.randn(outer, inner).to(kind)
    bias = torch.randn(outer).to(kind) if biased else None
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = PackedLinear(weight, bias)(x).double()
    tolerance = {"bf16": 2e-2, "fp32": 1e-5}[dtype] * (1 + inner**0.5)
    assert (got - wanted).abs().max() <= tolerance


def test_block_is_one_contiguous_range() -> None:
    layout = KvLayout(kv_heads=3, num_layers=30, block_size=16, head_dim=64, dtype=torch.bfloat16)
    cache = layout.allocate(2, CPU)
    assert cache[1].is_contiguous()
    assert layout.block_bytes == cache[1].numel() * 2 == 360 * 1024


def test_attention_ignores_what_lies_beyond_the_context() -> None:
    layout = KvLayout(kv_heads=1, num_layers=1, block_size=4, head_dim=8, dtype=torch.float32)
    cache = random_cache(layout)
    query = torch.randn(1, 2, 8)
    before = DecodeAttention(layout, cache, [AttentionRow(1, 6, [3, 5])], 2, 0.5)(0, query)
    cache[5, :, :, :, 2:] = 1e4
    assert torch.equal(before, DecodeAttention(layout, cache, [AttentionRow(1, 6, [3, 5])], 2, 0.5)(0, query))
