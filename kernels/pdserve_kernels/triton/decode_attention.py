"""Attention of one new token a request over its paged context: flash-decoding (Dao et al., 2023).

One program takes one KV head of one request and one part of its context, with the query heads of that KV head as the
rows of its products, so that each key and value is loaded once. A second kernel puts the parts together. The grid
depends on the number of rows and parts alone, never on the lengths, which are read on the device: a CUDA graph of it
stays right when contexts grow.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pdserve_kernels.contract import DecodeTables
from pdserve_kernels.layout import KvLayout
from pdserve_kernels.triton.online_softmax import softmax_step

TILE = 64
"""Tokens that a program looks at together."""

PROGRAMS_PER_PROCESSOR = 4
"""Enough to hide the latency of memory; more only makes more parts to put together."""

MAX_SPLITS = 128


@triton.jit
def _decode_kernel(
    query,
    tiles,
    context_lens,
    block_starts,
    blocks,
    out,
    partial,
    partial_lse,
    query_row_stride,
    query_head_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + member
    rows = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]

    context = tl.load(context_lens + request)
    oldest = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    first_tile = oldest // TILE
    end_tile = tl.cdiv(context, TILE)
    each = tl.cdiv(end_tile - first_tile, SPLITS)
    begin = first_tile + split * each
    end = tl.minimum(begin + each, end_tile)

    queries = tl.load(
        query + request * query_row_stride + head[:, None] * query_head_stride + column[None, :], mask=rows, other=0.0
    )
    table = blocks + tl.load(block_starts + request)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for tile in range(begin, end):
        token = tile * TILE + tl.arange(0, TILE)
        seen = (token >= oldest) & (token < context)
        block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        address = tiles + block * BLOCK_STRIDE + kv_head * HEAD_STRIDE + (token % BLOCK_SIZE) * HEAD_DIM
        loaded = seen[:, None] & (column < HEAD_DIM)[None, :]
        # What is hidden is read as 0: a NaN in memory that is not this request's must not be multiplied.
        keys = tl.load(address[:, None] + column[None, :], mask=loaded, other=0.0)
        values = tl.load(address[:, None] + BLOCK_SIZE * HEAD_DIM + column[None, :], mask=loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, highest, total, acc = softmax_step(scores, highest, total, acc)
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    # Without a token there is nothing to divide by: a part beyond the context, or a row of padding. A total that is
    # NaN is not that, and must stay to be seen.
    none = total == 0
    some = tl.where(none, 1.0, total)
    if SPLITS == 1:
        target = out + (request * KV_HEADS * GROUP + head[:, None]) * HEAD_DIM + column[None, :]
        tl.store(target, (acc / some[:, None]).to(out.dtype.element_ty), mask=rows)
    else:
        part = (request * KV_HEADS * GROUP + head) * SPLITS + split
        lse = tl.where(none, float("-inf"), highest + tl.log2(some))
        tl.store(partial_lse + part, lse, mask=member < GROUP)
        tl.store(
            partial + part[:, None] * HEAD_DIM + column[None, :], acc / some[:, None], mask=rows & (total > 0)[:, None]
        )


@triton.jit
def _combine_kernel(partial, partial_lse, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_DIM)
    lse = tl.load(partial_lse + row * SPLITS + split)
    highest = tl.max(lse, 0)
    # All parts of a row of padding are -inf, and -inf minus -inf would be NaN.
    weights = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    used = (lse > float("-inf"))[:, None] & (column < HEAD_DIM)[None, :]
    averages = tl.load(partial + (row * SPLITS + split[:, None]) * HEAD_DIM + column[None, :], mask=used, other=0.0)
    # The highest part has weight 1, so only a row of padding has less.
    mean = tl.sum(averages * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1.0)
    tl.store(out + row * HEAD_DIM + column, mean.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    layout: KvLayout,
    layer: int,
    tables: DecodeTables,
    scale: float,
    window: int | None,
    splits: int,
    out: torch.Tensor,
) -> None:
    """``reference.paged_attention`` of one token for each row of ``tables``; 0 for rows without a context.

    ``query`` is ``[rows, heads, head_dim]`` with a dense last dimension. ``splits`` is a power of two
    (``decode_splits``). ``out`` has the shape of ``query`` and is contiguous.
    """
    requests, heads, head_dim = query.shape
    if not requests:
        return
    group = heads // layout.kv_heads
    tiles = cache[:, :, layer]
    block_dim = max(16, triton.next_power_of_2(head_dim))
    partial, partial_lse = out, out
    if splits > 1:
        partial = torch.empty(requests, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(requests, heads, splits, dtype=torch.float32, device=query.device)
    _decode_kernel[(requests, layout.kv_heads, splits)](
        query,
        tiles,
        tables.context_lens,
        tables.block_starts,
        tables.blocks,
        out,
        partial,
        partial_lse,
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
        splits,
        max(16, triton.next_power_of_2(group)),
        block_dim,
        TILE,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _combine_kernel[(requests * heads,)](partial, partial_lse, out, head_dim, splits, block_dim)


def decode_splits(requests: int, kv_heads: int, max_context: int, processors: int) -> int:
    """In how many parts to attend to each context: enough programs for all processors, none with nothing to do.

    A power of two, so that few variants are compiled. ``max_context`` bounds the context of every row.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(1, requests * kv_heads)
    useful = min(wanted, -(-max_context // TILE), MAX_SPLITS)
    return 1 << (max(1, useful).bit_length() - 1)
