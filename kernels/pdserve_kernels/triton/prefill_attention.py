"""Causal attention of several new tokens a request over its paged context, all requests in one launch.

Flash attention (Dao et al., 2022) whose keys and values are found through the block table. One program takes one KV
head and a tile of new tokens, with the tokens' grouped query heads as the rows of its products. Whatever of the
context was cached before is simply more keys: nothing is gathered.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pdserve_kernels.layout import KvLayout
from pdserve_kernels.triton.online_softmax import softmax_step
from pdserve_kernels.triton.step_plan import SpanTables


@triton.jit
def _attend_tiles(
    queries,
    position,
    tiles,
    table,
    context,
    scale_log2,
    begin,
    end,
    highest,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    column = tl.arange(0, BLOCK_DIM)
    for tile in range(begin, end):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < context
        block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        address = tiles + block * BLOCK_STRIDE + (token % BLOCK_SIZE) * HEAD_DIM
        loaded = inside[:, None] & (column < HEAD_DIM)[None, :]
        keys = tl.load(address[:, None] + column[None, :], mask=loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        if MASKED:
            seen = (token[None, :] <= position[:, None]) & inside[None, :]
            if WINDOW:
                seen = seen & (token[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        weights, highest, total, acc = softmax_step(scores, highest, total, acc)
        values = tl.load(address[:, None] + BLOCK_SIZE * HEAD_DIM + column[None, :], mask=loaded, other=0.0)
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return highest, total, acc


@triton.jit
def _prefill_kernel(
    query,
    tiles,
    tile_rows,
    tile_tokens,
    query_starts,
    context_lens,
    block_starts,
    blocks,
    out,
    query_token_stride,
    query_head_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    work = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tile_rows + work)
    first_new = tl.load(tile_tokens + work)
    query_start = tl.load(query_starts + row)
    new_tokens = tl.load(query_starts + row + 1) - query_start
    context = tl.load(context_lens + row)
    table = blocks + tl.load(block_starts + row)

    line = tl.arange(0, BLOCK_M)
    new = first_new + line // GROUP
    head = kv_head * GROUP + line % GROUP
    column = tl.arange(0, BLOCK_DIM)
    valid = ((line < BLOCK_Q * GROUP) & (new < new_tokens))[:, None] & (column < HEAD_DIM)[None, :]
    token = (query_start + new).to(tl.int64)
    queries = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + column[None, :],
        mask=valid,
        other=0.0,
    )
    first_position = context - new_tokens + first_new
    # Lines beyond the tile's last token look where that one does; they are not stored.
    position = context - new_tokens + tl.minimum(new, new_tokens - 1)
    end = tl.cdiv(tl.minimum(first_position + BLOCK_Q, context), TILE)
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE
        masked_from = begin
    else:
        begin = 0
        # Every token of the tile sees all of a tile of keys that ends at or before the first of them.
        masked_from = (first_position + 1) // TILE

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    keys = tiles + kv_head * HEAD_STRIDE
    highest, total, acc = _attend_tiles(
        queries, position, keys, table, context, scale_log2, begin, masked_from, highest, total, acc,
        HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, False, BLOCK_DIM, TILE,
    )  # fmt: skip
    highest, total, acc = _attend_tiles(
        queries, position, keys, table, context, scale_log2, masked_from, end, highest, total, acc,
        HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, WINDOW, True, BLOCK_DIM, TILE,
    )  # fmt: skip
    target = out + (token[:, None] * (KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=valid)


def prefill_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    layout: KvLayout,
    layer: int,
    tables: SpanTables,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """``reference.paged_attention`` for each row of ``tables``.

    ``query`` is ``[tokens, heads, head_dim]``, the rows' new tokens one after another, with a dense last dimension.
    ``out`` has its shape and is contiguous.
    """
    _, heads, head_dim = query.shape
    group = heads // layout.kv_heads
    tiles = cache[:, :, layer]
    lines = lines_per_program(group, layout.dtype)
    _prefill_kernel[(len(tables.tile_rows), layout.kv_heads)](
        query,
        tiles,
        tables.tile_rows,
        tables.tile_tokens,
        tables.query_starts,
        tables.context_lens,
        tables.block_starts,
        tables.blocks,
        out,
        query.stride(0),
        query.stride(1),
        scale * math.log2(math.e),
        layout.kv_heads,
        group,
        head_dim,
        layout.block_size,
        tiles.stride(0),
        tiles.stride(1),
        window or 0,
        tables.tile_size,
        lines,
        max(16, triton.next_power_of_2(head_dim)),
        _keys_per_tile(layout.dtype),
        num_warps=8 if lines * head_dim >= 64 * 128 else 4,
        num_stages=2,
    )


def lines_per_program(group: int, dtype: torch.dtype) -> int:
    """Rows of a program's products: each is one query head of one token."""
    return max(_keys_per_tile(dtype) * 2, 1 << (group - 1).bit_length())


def _keys_per_tile(dtype: torch.dtype) -> int:
    """Keys that a program looks at together: what fits into its registers beside the sums."""
    return 128 // dtype.itemsize
