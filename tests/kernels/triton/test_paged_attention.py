"""Tests attention over the cache's blocks against its definition, whatever rows share a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow, DecodeTables
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton import paged_attention
from pdserve_kernels.triton.paged_attention import LEAST_TILE, MAX_SPLITS, TILE, decode_splits, tiles_to_try
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.kernels.shared_tables import check_shared_table, random_cache, spoil
from tests.kernels.triton.device import CPU, DEVICE, PRODUCT_DTYPES, SEEDS, assert_near, examples


@dataclass(frozen=True)
class Step:
    """The rows ``(new_tokens, context_len)`` of one step, and the shape of their model."""

    layout: KvLayout
    group: int
    rows: list[tuple[int, int]]
    window: int | None
    layer: int
    cap: float | None = None
    chunked: bool = False
    sunk: bool = False


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    head_dim = draw(st.sampled_from([2, 10, 16, 33, 64]))
    shared = draw(st.sampled_from([0, 0, head_dim // 2, head_dim - 1]))
    return KvLayout(
        kv_heads=1 if shared else draw(st.integers(1, 2)),
        num_layers=2,
        block_size=draw(st.sampled_from([1, 3, 4, 16, 64])),
        head_dim=head_dim,
        dtype=draw(PRODUCT_DTYPES),
        shared_channels=shared,
        fp8=draw(st.booleans()),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    contexts = st.integers(1, 40) | st.sampled_from([64, 65, 128, 150])
    singles = [(1, context) for context in draw(st.lists(contexts, max_size=3))]
    spans = []
    for new, before in draw(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 70)), max_size=2)):
        spans.append((new, new + before))
    return Step(
        layout=draw(layouts()),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        rows=[*singles, *spans] or [(1, 1)],
        window=draw(st.none() | st.integers(1, 80)),
        layer=draw(st.integers(0, 1)),
        cap=draw(st.sampled_from([None, None, 0.7, 30.0])),
        chunked=draw(st.booleans()),
        sunk=draw(st.booleans()),
    )


def step(
    rows: list[tuple[int, int]],
    block_size: int = 16,
    window: int | None = None,
    cap: float | None = None,
    chunked: bool = False,
    sunk: bool = False,
    group: int = 2,
    shared: int = 0,
    fp8: bool = False,
) -> Step:
    return Step(KvLayout(1, 2, block_size, 16, torch.float32, shared, fp8), group, rows, window, 1, cap, chunked, sunk)


def check(case: Step, seed: int, processors: int) -> None:
    """Checks that the kernels' attention of a step equals the reference's. Memory that the step does not own is NaN."""
    torch.manual_seed(seed)
    layout, heads = case.layout, case.layout.kv_heads * case.group
    needed = [math.ceil(context / layout.block_size) for _, context in case.rows]
    order = torch.randperm(sum(needed) + 2).tolist()
    cache = random_cache(layout, len(order))
    spoil(layout, cache, order[-2:])
    rows, first = [], 0
    for (new, context), count in zip(case.rows, needed, strict=True):
        blocks = order[first : first + count]
        # The last block may still hold another request's tokens behind this context, and so may the block after it.
        end = context - (count - 1) * layout.block_size
        if layout.fp8:
            layout.split(cache)[1][blocks[-1], :, :, :, end:] = reference.NOT_FINITE
        else:
            cache[blocks[-1], :, :, :, end:] = float("nan")
        rows.append(AttentionRow(new, context, [*blocks, order[-1]]))
        first += count
    held = []
    for row in rows:
        # Blocks that a window does not reach are given back, and then are another request's.
        out = (
            0
            if case.window is None
            else max(0, row.context_len - row.new_tokens - case.window + 1) // layout.block_size
        )
        held.append(AttentionRow(row.new_tokens, row.context_len, row.blocks[out:], out))
    kept = {block for row in held for block in row.blocks}
    spoilt = [block for block in range(len(order)) if block not in kept]
    tokens = sum(row.new_tokens for row in rows)
    # The query is a view, as the rotary embedding's output is: keys follow in the same rows.
    query = torch.randn(tokens, heads + 1, layout.head_dim).to(layout.dtype)
    key_value = torch.randn(layout.tiles_a_layer, tokens, layout.kv_heads, layout.head_dim).to(layout.dtype)
    moved = cache.to(DEVICE, copy=True)
    spoil(layout, moved, spoilt)
    scale = layout.head_dim**-0.5
    attend = TritonKernels(processors).plan_attention(layout, moved, held, heads, scale, case.cap)
    queries = query.to(DEVICE)[:, :heads]
    sinks = torch.randn(heads) * 4 if case.sunk else None
    more: dict[str, Any] = {"chunked": case.chunked, "sinks": None if sinks is None else sinks.to(DEVICE)}
    got = attend(case.layer, queries, key_value.to(DEVICE), case.window, **more)
    # What is stored already need not be given again.
    assert torch.equal(attend(case.layer, queries, None, case.window, **more), got)

    wanted, at = [], 0
    for row in rows:
        mine = slice(at, at + row.new_tokens)
        slots = [
            row.blocks[position // layout.block_size] * layout.block_size + position % layout.block_size
            for position in range(row.context_len - row.new_tokens, row.context_len)
        ]
        key, value = key_value[0, mine], key_value[-1, mine]
        reference.kv_write(cache, layout, case.layer, torch.tensor(slots), key, value)
        blocks = list(row.blocks[:-1])
        # The reference also multiplies masked values, so its cache must have no NaN.
        clean = cache.masked_fill(cache == reference.NOT_FINITE, 0) if layout.fp8 else cache.nan_to_num(0.0)
        wanted.append(
            reference.paged_attention(
                query[mine, :heads],
                clean,
                layout,
                case.layer,
                blocks,
                row.context_len,
                scale,
                case.window,
                case.cap,
                chunked=case.chunked,
                sinks=sinks,
            )
        )
        at += row.new_tokens
    spoil(layout, cache, spoilt)
    assert torch.equal(moved.cpu().nan_to_num(7.0), cache.nan_to_num(7.0))
    assert_near(got, torch.cat(wanted), 3)


@settings(max_examples=examples(40), deadline=None)
@given(steps(), SEEDS)
@example(step([(1, 1)]), 0)
@example(step([(1, 64), (1, 16), (64, 64)]), 0)
@example(step([(1, 150)], window=1), 0)
@example(step([(40, 110)], window=1), 0)
@example(step([(1, 64), (1, 65), (1, 150), (40, 110)], window=32, chunked=True), 0)
@example(step([(1, 64), (1, 65), (1, 150), (40, 110)], window=32, sunk=True), 0)
@example(step([(1, 150)], sunk=True), 0)
@example(step([(129, 129)], block_size=64), 0)
@example(step([(1, 150), (40, 110)], cap=0.5), 0)
@example(step([(1, 64), (1, 65), (3, 70)], group=40, shared=12), 0)
@example(step([(1, 64), (1, 150), (40, 110)], group=5, shared=10, window=32, sunk=True), 0)
@example(step([(1, 64), (1, 150), (40, 110)], fp8=True), 0)
@example(step([(1, 64), (1, 150), (40, 110)], group=5, shared=10, window=32, fp8=True), 0)
@example(step([(1, 64), (1, 150), (40, 110)], block_size=3, window=32, sunk=True, fp8=True), 0)
@example(step([(1, 150), (40, 110)], cap=0.5, window=32, chunked=True, fp8=True), 0)
def test_a_step(case: Step, seed: int) -> None:
    check(case, seed, processors=2)


def test_tiles_shrink_until_nothing_smaller_is_possible() -> None:
    assert list(tiles_to_try(64, 3)) == [(64, 3), (32, 3), (16, 3), (16, 2), (16, 1)]
    assert list(tiles_to_try(LEAST_TILE, 1)) == [(LEAST_TILE, 1)]


@pytest.mark.parametrize("window", [None, 30])
def test_a_gpu_for_which_the_usual_tiles_are_too_large(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    launched = []

    def too_large(keys: int, stages: int, least: int) -> list[tuple[int, int]]:
        launched.append(keys)
        return [(least, 1)]

    monkeypatch.setattr(paged_attention, "tiles_to_try", too_large)
    monkeypatch.setattr(paged_attention, "_fitting", {})
    check(step([(1, 700), (1, 3), (40, 110), (2, 33)], window=window), seed=1, processors=2)
    # The two kernels, each for keys that are stored first and for those that are there.
    assert len(launched) == 4
    assert min(launched) > LEAST_TILE


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("processors", [1, 2, 8])
def test_a_long_context_in_parts(processors: int, window: int | None) -> None:
    check(step([(1, 700), (1, 3)], window=window), seed=processors, processors=processors)


@pytest.mark.parametrize(
    ("processors", "window"),
    [
        (1, None),
        (64, 30),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, 30), (2, None), (2, 30), (64, None))),
    ],
)
def test_rows_that_share_a_block_table(processors: int, window: int | None) -> None:
    torch.manual_seed(processors)
    layout = KvLayout(2, 2, 16, 32, torch.float32) if processors == 1 else KvLayout(1, 2, 16, 32, torch.float32, 24)
    kernels = TritonKernels(processors)
    # With more processors a context is cut into more parts, and into fewer if there are more rows.
    assert check_shared_table(kernels, layout, 3, past=150, new=7, window=window, device=DEVICE) <= 1e-5


@pytest.mark.parametrize("processors", [1, 8])
@pytest.mark.parametrize("spoilt", [slice(None), slice(0, 1), slice(15, 16)])
def test_a_request_that_is_not_finite_keeps_it_to_itself(processors: int, spoilt: slice) -> None:
    layout = KvLayout(1, 1, 16, 16, torch.float32)
    cache = torch.randn_like(layout.allocate(30, CPU))
    cache[3, :, :, :, spoilt] = float("nan")
    rows = [AttentionRow(1, 150, range(10)), AttentionRow(1, 4, [10]), AttentionRow(3, 4, [11])]
    attend = TritonKernels(processors).plan_attention(layout, cache.to(DEVICE), rows, 2, 0.25)
    out = attend(0, torch.randn(5, 2, 16, device=DEVICE), torch.randn(2, 5, 1, 16, device=DEVICE))
    assert out.isfinite().flatten(1).all(1).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("processors", [1, 8])
def test_rows_of_padding_read_nothing_and_give_zero(processors: int) -> None:
    layout = KvLayout(1, 1, 4, 16, torch.float32)
    cache = torch.full_like(layout.allocate(4, DEVICE), float("nan"))
    tables = DecodeTables(*torch.zeros(3, 2, dtype=torch.int32, device=DEVICE).unbind())
    slots = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    attend = TritonKernels(processors).plan_decode(layout, cache, slots, tables, 2, 0.25, 1000)
    out = attend(0, torch.randn(2, 2, 16, device=DEVICE), torch.randn(2, 2, 1, 16, device=DEVICE))
    assert not out.any()
    assert bool(cache.isnan().all())


def test_unordered_rows_are_refused() -> None:
    layout = KvLayout(1, 1, 4, 16, torch.float32)
    rows = [AttentionRow(2, 2, [0]), AttentionRow(1, 1, [1])]
    with pytest.raises(ValueError, match="one token must come before"):
        TritonKernels(1).plan_attention(layout, layout.allocate(2, DEVICE), rows, 1, 1.0)


@given(st.integers(1, 600), st.integers(1, 64), st.integers(1, 200_000), st.integers(1, 200))
def test_parts_are_a_power_of_two_and_never_without_tokens(
    requests: int, kv_heads: int, max_context: int, processors: int
) -> None:
    splits = decode_splits(requests, kv_heads, max_context, processors)
    assert splits.bit_count() == 1
    assert splits <= MAX_SPLITS
    assert splits == 1 or (splits - 1) * TILE < max_context


def test_a_long_context_alone_fills_the_processors_and_a_full_batch_is_not_cut() -> None:
    assert decode_splits(1, 8, 100_000, 132) == 64
    assert decode_splits(128, 8, 100_000, 132) == 1
