"""Computes attention over the paged KV cache: of one new token a request (decode), and of several (prefill).

Both are flash attention (Dao et al., 2022) over keys and values that are found through the block table: a softmax that
never sees all scores at once (Milakov and Gimelshein, 2018).

Decode is flash-decoding (Dao et al., 2023). One program takes one KV head of one request and one part of its context,
with the query heads of that KV head as the rows of its products, so that each key and value is loaded once. A second
kernel puts the parts together. The grid depends only on the numbers of rows and parts. The lengths are read on the
device, so a CUDA graph of the kernels stays right when contexts grow.

Prefill is causal, and takes all requests in one launch. One program takes one KV head and a tile of new tokens, with
the tokens' grouped query heads as the rows of its products. The context that was cached before is read in place,
like the new keys.

How many keys a program holds in shared memory depends on the head size, the number format and how the compiler arranges
the products for a kind of GPU. GPUs differ in how much there is: 227 KiB for a program, or 99. So a launch takes the
largest tile of keys that fits (``launch_fitting``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from pdserve_kernels.contract import DecodeTables
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton.attention_plan import SpanTables
from pdserve_kernels.triton.fp8 import scale_of, unscaled

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def softmax_step(scores, highest, total, acc):
    """Adds the scores of some more tokens to a running softmax.

    ``scores``, ``[rows, tokens]``, are in units of log 2, and -inf for hidden tokens. Returns the weights of these
    tokens, and ``highest``, ``total`` and ``acc``, rescaled to the new highest score. A row that has seen only hidden
    tokens keeps -inf, 0 and 0.
    """
    risen = tl.maximum(highest, tl.max(scores, 1))
    # -inf minus -inf would be NaN.
    reference = tl.where(risen == float("-inf"), 0.0, risen)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(highest - reference)
    return weights, risen, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]


@triton.jit
def bounded(scores, CAP: tl.constexpr):
    """Returns ``CAP * tanh(scores / CAP)``, for scores and ``CAP`` in units of log 2, or the scores if ``CAP`` is 0."""
    if CAP > 0:
        # tanh(u) is 1 - 2 / (exp(2 u) + 1).
        scores = CAP - 2 * CAP / (tl.exp2(scores * (2 * LOG2_E / CAP)) + 1)
    return scores


TILE = 64
"""The tokens that a program looks at together, if they fit."""

LEAST_TILE = 16
"""Products have no side that is shorter."""

PROGRAMS_PER_PROCESSOR = 4
"""This number hides the latency of memory; a higher one only makes more parts to put together."""

MAX_SPLITS = 128

MOST_WIDE_HEADS = 16
"""The heads of latent attention of one program, whose sums have 512 numbers each."""

WIDE_LINES = 32
"""The rows of a program's products in latent attention of several tokens."""

WIDE = 256
"""Sums of more numbers are spread over twice as many threads."""


def tiles_to_try(keys: int, stages: int, least: int = LEAST_TILE) -> Iterator[tuple[int, int]]:
    """Yields numbers of keys and of stages of a loop's pipeline, from the most shared memory to the least."""
    while keys > least:
        yield keys, stages
        keys //= 2
    yield from ((keys, fewer) for fewer in range(stages, 0, -1))


_fitting: dict[Hashable, int] = {}
"""Which of its tiles each kernel was launched with last, for each GPU and all that the kernel is compiled for."""


def launch_fitting(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: tuple[float, ...],
    stages: int,
    warps: int,
    least: int = LEAST_TILE,
) -> None:
    """Launches a kernel with the largest tile that the GPU has shared memory for. ``constants`` end with the largest.

    A tile is halved until it is no larger than ``least``.

    Triton says what a kernel needs once it is compiled. What does not fit is compiled once, at the engine's start.
    Raises OutOfResources if even the smallest tile does not fit.
    """
    query = arguments[0]
    key = (kernel.fn, query.device, query.dtype, constants)
    tiles = list(tiles_to_try(int(constants[-1]), stages, least))
    for at in range(_fitting.get(key, 0), len(tiles)):
        keys, deep = tiles[at]
        try:
            kernel[grid](*arguments, *constants[:-1], keys, num_warps=warps, num_stages=deep)
        except OutOfResources:
            if at + 1 == len(tiles):
                raise
        else:
            _fitting[key] = at
            return


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    return position - position % WINDOW if CHUNKED else tl.maximum(position - WINDOW + 1, 0)


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
    sinks,
    query_row_stride,
    query_head_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    FP8: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + member
    rows = (member < GROUP)[:, None] & (column < VALUE_DIM)[None, :]

    context = tl.load(context_lens + request)
    # A row of padding has no context, and so no newest token.
    oldest = first_seen(tl.maximum(context - 1, 0), WINDOW, CHUNKED) if WINDOW else 0
    first_tile = oldest // TILE
    end_tile = tl.cdiv(context, TILE)
    each = tl.cdiv(end_tile - first_tile, SPLITS)
    begin = first_tile + split * each
    end = tl.minimum(begin + each, end_tile)

    start = query + request * query_row_stride + head[:, None] * query_head_stride
    queries = tl.load(start + column[None, :], mask=rows, other=0.0)
    if SHARED:
        rest = VALUE_DIM + tl.arange(0, BLOCK_REST)
        more = (member < GROUP)[:, None] & (rest < HEAD_DIM)[None, :]
        rest_of_queries = tl.load(start + rest[None, :], mask=more, other=0.0)
    table = blocks + tl.load(block_starts + request)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and SPLITS == 1:
        highest = tl.load(sinks + head, mask=member < GROUP, other=0.0) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for tile in range(begin, end):
        token = tile * TILE + tl.arange(0, TILE)
        seen = (token >= oldest) & (token < context)
        if CHOSEN:
            slot = tl.load(table + token, mask=seen, other=0).to(tl.int64)
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            offset = token % BLOCK_SIZE
        address = tiles + block * BLOCK_STRIDE + kv_head * HEAD_STRIDE + offset * ROW_SIZE
        loaded = seen[:, None] & (column < VALUE_DIM)[None, :]
        to_value = 0 if SHARED else BLOCK_SIZE * (ROW_SIZE + FP8)
        # Hidden tokens are read as 0: a NaN in memory that is not this request's must not be multiplied.
        keys = tl.load(address[:, None] + column[None, :], mask=loaded, other=0)
        values = keys if SHARED else tl.load(address[:, None] + to_value + column[None, :], mask=loaded, other=0)
        if FP8:
            # A product with a power of two is exact: scores are scaled for keys, and weights for values.
            exponent = address + BLOCK_SIZE * ROW_SIZE - offset * (ROW_SIZE - 1)
            key_scale = scale_of(tl.load(exponent, mask=seen, other=0))
            value_scale = scale_of(tl.load(exponent + to_value, mask=seen, other=0))
            keys, values = unscaled(keys).to(queries.dtype), unscaled(values).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if SHARED:
            also = seen[:, None] & (rest < HEAD_DIM)[None, :]
            rest_of_keys = tl.load(address[:, None] + rest[None, :], mask=also, other=0)
            if FP8:
                rest_of_keys = unscaled(rest_of_keys).to(queries.dtype)
            scores += tl.dot(rest_of_queries, tl.trans(rest_of_keys), input_precision="ieee")
        if FP8:
            scores *= key_scale[None, :]
        scores = bounded(scores * scale_log2, CAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, highest, total, acc = softmax_step(scores, highest, total, acc)
        if FP8:
            weights *= value_scale[None, :]
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    # A part beyond the context, or a row of padding, has no token and a total of 0, by which nothing can be divided. A
    # total that is NaN stays, so that the engine notices it.
    none = total == 0
    some = tl.where(none, 1.0, total)
    if SPLITS == 1:
        target = out + (request * KV_HEADS * GROUP + head[:, None]) * VALUE_DIM + column[None, :]
        tl.store(target, (acc / some[:, None]).to(out.dtype.element_ty), mask=rows)
    else:
        part = (request * KV_HEADS * GROUP + head) * SPLITS + split
        lse = tl.where(none, float("-inf"), highest + tl.log2(some))
        tl.store(partial_lse + part, lse, mask=member < GROUP)
        tl.store(
            partial + part[:, None] * VALUE_DIM + column[None, :], acc / some[:, None], mask=rows & (total > 0)[:, None]
        )


@triton.jit
def _combine_kernel(
    partial,
    partial_lse,
    sinks,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_DIM)
    lse = tl.load(partial_lse + row * SPLITS + split)
    highest = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks + row % HEADS) * LOG2_E
        highest = tl.maximum(highest, sink)
    # All parts of a row of padding are -inf, and -inf minus -inf would be NaN.
    weights = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    used = (lse > float("-inf"))[:, None] & (column < HEAD_DIM)[None, :]
    averages = tl.load(partial + (row * SPLITS + split[:, None]) * HEAD_DIM + column[None, :], mask=used, other=0.0)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - highest)
    # The highest part, or the sink, has weight 1, so only a row of padding has less.
    mean = tl.sum(averages * weights[:, None], 0) / tl.maximum(total, 1.0)
    tl.store(out + row * HEAD_DIM + column, mean.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    layout: KvLayout,
    layer: int,
    tables: DecodeTables,
    scale: float,
    cap: float | None,
    window: int | None,
    chunked: bool,
    sinks: torch.Tensor | None,
    splits: int,
    out: torch.Tensor,
    *,
    chosen: bool = False,
) -> None:
    """Computes ``reference.paged_attention`` of one token for each row of ``tables``, 0 for rows without a context.

    ``query`` is ``[rows, heads, head_dim]`` with a dense last dimension; keys may have more channels. ``splits`` is a
    power of two (``decode_splits``). ``out``, ``[rows, heads, value_dim]``, is contiguous. With ``chosen``, ``tables``
    has, in place of blocks, ``block * block_size + offset`` of each token of a context.
    """
    requests, heads, head_dim = query.shape
    if not requests:
        return
    programs, group = programs_of_heads(layout, heads)
    tiles, value_dim = cache[:, :, layer], layout.value_dim
    block_dim = max(16, triton.next_power_of_2(value_dim))
    partial, partial_lse = out, out
    if splits > 1:
        partial = torch.empty(requests, heads, splits, value_dim, dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(requests, heads, splits, dtype=torch.float32, device=query.device)
    launch_fitting(
        _decode_kernel,
        (requests, programs, splits),
        (
            query,
            tiles,
            tables.context_lens,
            tables.block_starts,
            tables.blocks,
            out,
            partial,
            partial_lse,
            out if sinks is None else sinks,
            query.stride(0),
            query.stride(1),
            scale * LOG2_E.value,
        ),
        (
            programs,
            group,
            head_dim,
            layout.block_size,
            tiles.stride(0),
            0 if layout.shared_channels else tiles.stride(1),
            (cap or 0.0) * LOG2_E.value,
            window or 0,
            chunked,
            sinks is not None,
            splits,
            value_dim,
            bool(layout.shared_channels),
            layout.fp8,
            chosen,
            layout.head_dim,
            max(16, triton.next_power_of_2(group)),
            block_dim,
            _block_rest(head_dim - value_dim),
            TILE,
        ),
        stages=3,
        warps=8 if block_dim > WIDE else 4,
    )
    if splits > 1:
        some = out if sinks is None else sinks
        _combine_kernel[(requests * heads,)](
            partial, partial_lse, some, out, heads, value_dim, sinks is not None, splits, block_dim
        )


def programs_of_heads(layout: KvLayout, heads: int) -> tuple[int, int]:
    """Returns how many programs share a rank's query heads, and the heads of one.

    A program has the heads of one KV head. Those of latent attention are too many, and too wide, for one.
    """
    if not layout.shared_channels:
        return layout.kv_heads, heads // layout.kv_heads
    group = next(count for count in range(min(heads, MOST_WIDE_HEADS), 0, -1) if heads % count == 0)
    return heads // group, group


def _block_rest(rest: int) -> int:
    """Returns the channels that a program takes of the ``rest`` of a key that its value has not."""
    channels: int = triton.next_power_of_2(rest)
    return max(16, channels)


def decode_splits(requests: int, kv_heads: int, max_context: int, processors: int) -> int:
    """Returns the number of parts of each context, so that all processors have programs and every program has work.

    It is a power of two, so that few variants are compiled. ``max_context`` bounds the context of every row.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(1, requests * kv_heads)
    useful = min(wanted, -(-max_context // TILE), MAX_SPLITS)
    return 1 << (max(1, useful).bit_length() - 1)


@triton.jit
def _attend_tiles(
    queries,
    rest_of_queries,
    position,
    tiles,
    table,
    context,
    scale_log2,
    oldest,
    begin,
    end,
    highest,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    MASKED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    TILE: tl.constexpr,
):
    column = tl.arange(0, BLOCK_DIM)
    rest = VALUE_DIM + tl.arange(0, BLOCK_REST)
    for tile in range(begin, end):
        token = tile * TILE + tl.arange(0, TILE)
        inside = token < context
        if WINDOW:
            # The block of a token that no line sees may be another request's by now.
            inside = inside & (token >= oldest)
        block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        address = tiles + block * BLOCK_STRIDE + (token % BLOCK_SIZE) * HEAD_DIM
        loaded = inside[:, None] & (column < VALUE_DIM)[None, :]
        keys = tl.load(address[:, None] + column[None, :], mask=loaded, other=0)
        if FP8:
            exponent = address + BLOCK_SIZE * HEAD_DIM - (token % BLOCK_SIZE) * (HEAD_DIM - 1)
            keys = unscaled(keys).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if SHARED:
            also = inside[:, None] & (rest < HEAD_DIM)[None, :]
            rest_of_keys = tl.load(address[:, None] + rest[None, :], mask=also, other=0)
            if FP8:
                rest_of_keys = unscaled(rest_of_keys).to(queries.dtype)
            scores += tl.dot(rest_of_queries, tl.trans(rest_of_keys), input_precision="ieee")
        if FP8:
            key_scale = scale_of(tl.load(exponent, mask=inside, other=0))
            scores *= key_scale[None, :]
        scores = bounded(scores * scale_log2, CAP)
        if MASKED:
            seen = (token[None, :] <= position[:, None]) & inside[None, :]
            if WINDOW:
                seen = seen & (token[None, :] >= first_seen(position, WINDOW, CHUNKED)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights, highest, total, acc = softmax_step(scores, highest, total, acc)
        if SHARED:
            values = keys
            if FP8:
                weights *= key_scale[None, :]
        else:
            to_value = BLOCK_SIZE * (HEAD_DIM + FP8)
            values = tl.load(address[:, None] + to_value + column[None, :], mask=loaded, other=0)
            if FP8:
                weights *= scale_of(tl.load(exponent + to_value, mask=inside, other=0))[None, :]
                values = unscaled(values).to(queries.dtype)
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
    sinks,
    query_token_stride,
    query_head_stride,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
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
    lines = (line < BLOCK_Q * GROUP) & (new < new_tokens)
    valid = lines[:, None] & (column < VALUE_DIM)[None, :]
    token = (query_start + new).to(tl.int64)
    start = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride
    queries = tl.load(start + column[None, :], mask=valid, other=0.0)
    rest_of_queries = queries
    if SHARED:
        rest = VALUE_DIM + tl.arange(0, BLOCK_REST)
        rest_of_queries = tl.load(start + rest[None, :], mask=lines[:, None] & (rest < HEAD_DIM)[None, :], other=0.0)
    first_position = context - new_tokens + first_new
    # Lines beyond the tile's last token read what that one reads. They are not stored.
    position = context - new_tokens + tl.minimum(new, new_tokens - 1)
    end = tl.cdiv(tl.minimum(first_position + BLOCK_Q, context), TILE)
    if WINDOW:
        oldest = first_seen(first_position, WINDOW, CHUNKED)
        begin = oldest // TILE
        masked_from = begin
    else:
        oldest = 0
        begin = 0
        # Every token of the tile sees all of a tile of keys that ends at or before the first of them.
        masked_from = (first_position + 1) // TILE

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        highest = tl.load(sinks + head) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    keys = tiles + kv_head * HEAD_STRIDE
    highest, total, acc = _attend_tiles(
        queries, rest_of_queries, position, keys, table, context, scale_log2, oldest, begin, masked_from, highest,
        total, acc, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, CAP, WINDOW, CHUNKED, False, VALUE_DIM, SHARED, FP8,
        BLOCK_DIM, BLOCK_REST, TILE,
    )  # fmt: skip
    highest, total, acc = _attend_tiles(
        queries, rest_of_queries, position, keys, table, context, scale_log2, oldest, masked_from, end, highest,
        total, acc, HEAD_DIM, BLOCK_SIZE, BLOCK_STRIDE, CAP, WINDOW, CHUNKED, True, VALUE_DIM, SHARED, FP8,
        BLOCK_DIM, BLOCK_REST, TILE,
    )  # fmt: skip
    target = out + (token[:, None] * (KV_HEADS * GROUP) + head[:, None]) * VALUE_DIM + column[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=valid)


def prefill_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    layout: KvLayout,
    layer: int,
    tables: SpanTables,
    scale: float,
    cap: float | None,
    window: int | None,
    chunked: bool,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Computes ``reference.paged_attention`` for each row of ``tables``.

    ``query`` is ``[tokens, heads, head_dim]``, the rows' new tokens one after another, with a dense last dimension.
    ``out``, ``[tokens, heads, value_dim]``, is contiguous.
    """
    _, heads, head_dim = query.shape
    programs, group = programs_of_heads(layout, heads)
    tiles = cache[:, :, layer]
    lines = lines_per_program(group, layout)
    launch_fitting(
        _prefill_kernel,
        (len(tables.tile_rows), programs),
        (
            query,
            tiles,
            tables.tile_rows,
            tables.tile_tokens,
            tables.query_starts,
            tables.context_lens,
            tables.block_starts,
            tables.blocks,
            out,
            out if sinks is None else sinks,
            query.stride(0),
            query.stride(1),
            scale * LOG2_E.value,
        ),
        (
            programs,
            group,
            head_dim,
            layout.block_size,
            tiles.stride(0),
            0 if layout.shared_channels else tiles.stride(1),
            (cap or 0.0) * LOG2_E.value,
            window or 0,
            chunked,
            sinks is not None,
            tables.tile_size,
            layout.value_dim,
            bool(layout.shared_channels),
            layout.fp8,
            lines,
            max(16, triton.next_power_of_2(layout.value_dim)),
            _block_rest(head_dim - layout.value_dim),
            _keys_per_tile(layout.dtype),
        ),
        stages=2,
        warps=8 if lines * head_dim >= 64 * 128 else 4,
    )


def lines_per_program(group: int, layout: KvLayout) -> int:
    """Returns the number of rows of a program's products, each of which is one of ``group`` query heads of a token."""
    usual = WIDE_LINES if layout.shared_channels else _keys_per_tile(layout.dtype) * 2
    return max(usual, 1 << (group - 1).bit_length())


def _keys_per_tile(dtype: torch.dtype) -> int:
    """Returns how many keys a program looks at together: as many as fit into its registers beside the sums."""
    return 128 // dtype.itemsize
