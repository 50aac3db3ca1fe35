"""Tests attention to chosen tokens in Triton."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels.contract import AttentionRow, DecodeTables, IndexQueries, SparseForm
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton import sparse_attention
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.kernels.chosen_tokens import defined, random_step
from tests.kernels.shared_tables import spoil
from tests.kernels.triton.device import DEVICE, PRODUCT_DTYPES, SEEDS, assert_near, examples


@settings(max_examples=examples(36))
@given(st.data(), st.integers(1, 3), st.sampled_from([1, 4, 16]), st.integers(1, 40), PRODUCT_DTYPES, SEEDS)
def test_each_token_attends_to_its_own_choice(
    data: st.DataObject, layers: int, block_size: int, count: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    rank, turned, channels = data.draw(st.sampled_from([(20, 4, 6), (64, 16, 32)]))
    layout = KvLayout(1, layers, block_size, rank + turned + channels, dtype, rank, data.draw(st.booleans()))
    blocks, rows = iter(torch.randperm(60).tolist()), []
    for _ in range(data.draw(st.integers(1, 2))):
        context = data.draw(st.integers(1, min(150, 20 * block_size)))
        own = [next(blocks) for _ in range(-(-context // block_size))]
        rows.append(AttentionRow(data.draw(st.integers(1, min(context, 3))), context, own))
    heads, sinks = data.draw(st.sampled_from([1, 5])), data.draw(st.booleans())
    pool = 1 if layout.fp8 else data.draw(st.sampled_from([1, 1, 3, 8]))
    step = random_step(layout, rows, heads, count, 60, channels, sinks=sinks, pool=pool)
    owned = {block for row in rows for block in row.blocks}
    cache = step.cache.clone()
    spoil(layout, cache, [block for block in range(60) if block not in owned])
    cache = cache.to(DEVICE)
    # A few scores at a time, and few of them together.
    with patch.object(sparse_attention, "SCORES_AT_ONCE", 200), patch.object(sparse_attention, "PLACES", 32):
        got = step.on(DEVICE).attended(TritonKernels(data.draw(st.sampled_from([1, 8]))), cache)
    wanted, stored = defined(step)
    assert torch.equal(cache.cpu()[list(owned)], stored[list(owned)])
    assert_near(got, wanted.to(dtype), steps=4)


def test_rows_of_padding_read_nothing_and_give_zero() -> None:
    layout = KvLayout(1, 1, 4, 30, torch.float32, 20)
    cache = torch.full_like(layout.allocate(4, DEVICE), float("nan"))
    tables = DecodeTables(*torch.zeros(3, 2, dtype=torch.int32, device=DEVICE).unbind())
    slots = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    attend = TritonKernels(4).plan_sparse_decode(layout, cache, slots, tables, 3, 0.25, 1000, SparseForm(8, 24))
    index = IndexQueries(torch.randn(2, 5, 6, device=DEVICE), torch.randn(2, 5, device=DEVICE))
    out = attend(0, torch.randn(2, 3, 24, device=DEVICE), torch.randn(1, 2, 1, 30, device=DEVICE), index)
    assert not out.any()
    assert bool(cache.isnan().all())


def test_what_does_not_fit_is_refused() -> None:
    layout, row = KvLayout(1, 2, 4, 14, torch.float32, 4), AttentionRow(1, 5, [0, 1])
    step = random_step(layout, [row], 2, 3, 8, 6).on(DEVICE)
    attend = TritonKernels(4).plan_sparse(layout, step.cache, [row], 2, 1.0, step.form)
    with pytest.raises(ValueError, match="no layer before this one has chosen tokens"):
        attend(0, step.query, step.key, None)
    plain = KvLayout(1, 2, 4, 14, torch.float32)
    with pytest.raises(ValueError, match="tokens are chosen where keys have the values in them"):
        TritonKernels(4).plan_sparse(plain, plain.allocate(2, DEVICE), [row], 2, 1.0, step.form)
