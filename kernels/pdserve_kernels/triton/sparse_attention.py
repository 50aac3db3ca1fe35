"""Attends to the tokens that index keys choose, on a GPU. The host waits for nothing, and a step can be recorded.

One kernel scores all tokens of each context. The lowest of the highest scores comes from ``torch.topk``, and a second
kernel writes which tokens reach it, in their order. The attention is that of single tokens, whose table has the places
of the chosen tokens in place of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from pdserve_kernels.contract import (
    SCORES_AT_ONCE,
    AttentionRow,
    DecodeTables,
    IndexQueries,
    SparseForm,
    check_choosing,
)
from pdserve_kernels.host_copies import block_ids, joined, to_device
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton.attention_plan import new_slots
from pdserve_kernels.triton.cache_ops import kv_write
from pdserve_kernels.triton.fp8 import scale_of, unscaled
from pdserve_kernels.triton.paged_attention import decode_attention, decode_splits, programs_of_heads

KEYS = 64
"""The index keys that a program scores."""
PLACES = 1024
"""The scores that a program looks at together where it chooses."""
LEAST_SCORE = tl.constexpr(-3.0e38)
"""A score is no lower, so that there are none among the chosen that stand behind a context."""


@triton.jit
def _score_kernel(
    query,
    weights,
    tiles,
    context_lens,
    block_starts,
    blocks,
    scores,
    width,
    POOL: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    context = tl.load(context_lens + token) // POOL
    head = tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, BLOCK_CHANNELS)
    seen = place < context
    total = tl.full([KEYS], float("-inf"), tl.float32)
    if tl.program_id(1) * KEYS < context:
        start = query + token * HEADS * CHANNELS
        used = (head < HEADS)[:, None] & (channel < CHANNELS)[None, :]
        queries = tl.load(start + head[:, None] * CHANNELS + channel[None, :], mask=used, other=0.0)
        weight = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
        table = blocks + tl.load(block_starts + token)
        # The key of a pool is that of its last token.
        at = place * POOL + (POOL - 1)
        block = tl.load(table + at // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        tile, offset = tiles + block * BLOCK_STRIDE, at % BLOCK_SIZE
        address = tile + offset * ROW_SIZE + FIRST
        loaded = seen[:, None] & (channel < CHANNELS)[None, :]
        keys = tl.load(address[:, None] + channel[None, :], mask=loaded, other=0)
        if FP8:
            keys = unscaled(keys).to(queries.dtype)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if FP8:
            products *= scale_of(tl.load(tile + BLOCK_SIZE * ROW_SIZE + offset, mask=seen, other=0))[None, :]
        # NaN is not below 0, and stays.
        products = tl.where(products < 0, 0.0, products)
        found = tl.sum(products * weight[:, None], 0)
        found = tl.where(found == found, tl.maximum(found, LEAST_SCORE), float("inf"))
        total = tl.where(seen, found, total)
    tl.store(scores + token * width + place, total, mask=place < width)


@triton.jit
def _choose_kernel(
    scores,
    lowest,
    equals,
    context_lens,
    block_starts,
    blocks,
    chosen,
    width,
    POOL: tl.constexpr,
    BLOCK_POOL: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tokens = tl.load(context_lens + token)
    context = tokens // POOL
    least = tl.load(lowest + token)
    room = tl.load(equals + token)
    table = blocks + tl.load(block_starts + token)
    taken = 0
    equal = 0
    for first in range(0, context, PLACES):
        place = first + tl.arange(0, PLACES)
        seen = place < context
        score = tl.load(scores + token * width + place, mask=seen, other=float("-inf"))
        same = (seen & (score == least)).to(tl.int32)
        # Of equal scores, the first ones are taken.
        take = seen & ((score > least) | ((same == 1) & (equal + tl.cumsum(same, 0) <= room)))
        counted = take.to(tl.int32)
        to = (taken + tl.cumsum(counted, 0) - 1) * POOL
        for each in range(POOL):
            at = place * POOL + each
            block = tl.load(table + at // BLOCK_SIZE, mask=take, other=0)
            tl.store(chosen + token * MOST + to + each, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=take)
        taken += tl.sum(counted, 0)
        equal += tl.sum(same, 0)
    if POOL > 1:
        # What is behind the last pool.
        each = tl.arange(0, BLOCK_POOL)
        at = context * POOL + each
        block = tl.load(table + at // BLOCK_SIZE, mask=at < tokens, other=0)
        tl.store(chosen + token * MOST + taken * POOL + each, block * BLOCK_SIZE + at % BLOCK_SIZE, mask=at < tokens)


def choose(
    cache: torch.Tensor,
    layout: KvLayout,
    layer: int,
    tables: DecodeTables,
    index: IndexQueries,
    form: SparseForm,
    max_context: int,
    chosen: torch.Tensor,
) -> None:
    """Writes ``block * block_size + offset`` of the tokens that each token attends to, in their order, to ``chosen``.

    It is int32 ``[tokens, most]``. What is behind a context that is shorter means nothing.
    """
    query, weights = index.query.contiguous(), index.weights.contiguous()
    count, heads, channels = query.shape
    taken = form.count // form.pool
    width, tiles = max(max_context // form.pool, taken), cache[:, :, layer]
    each = max(1, SCORES_AT_ONCE // width)
    for first in range(0, count, each):
        some = slice(first, min(first + each, count))
        found = some.stop - some.start
        lens, starts = tables.context_lens[some], tables.block_starts[some]
        scores = torch.empty(found, width, dtype=torch.float32, device=query.device)
        _score_kernel[(found, triton.cdiv(width, KEYS))](
            query[some],
            weights[some],
            tiles,
            lens,
            starts,
            tables.blocks,
            scores,
            width,
            form.pool,
            heads,
            channels,
            form.first,
            layout.block_size,
            tiles.stride(0),
            layout.head_dim,
            layout.fp8,
            max(16, triton.next_power_of_2(heads)),
            max(16, triton.next_power_of_2(channels)),
            KEYS,
        )
        highest = scores.topk(taken, sorted=False).values
        lowest = highest.amin(1)
        equals = taken - (highest > lowest.unsqueeze(1)).sum(1, dtype=torch.int32)
        _choose_kernel[(found,)](
            scores,
            lowest,
            equals,
            lens,
            starts,
            tables.blocks,
            chosen[some],
            width,
            form.pool,
            triton.next_power_of_2(form.pool),
            form.most,
            layout.block_size,
            PLACES,
        )


class TritonSparseAttention:
    """Satisfies ``contract.SparseAttention``, for single-token rows."""

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        tables: DecodeTables,
        heads: int,
        scale: float,
        max_context: int,
        form: SparseForm,
        processors: int,
    ) -> None:
        check_choosing(layout, form)
        self._layout, self._cache, self._slots, self._tables = layout, cache, slots, tables
        self._scale, self._form, self._max_context = scale, form, max_context
        self._splits = decode_splits(len(slots), programs_of_heads(layout, heads)[0], form.most, processors)
        self._chosen: DecodeTables | None = None

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        index: IndexQueries | None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``contract.SparseAttention``."""
        layout, form, count = self._layout, self._form, len(query)
        kv_write(self._cache, layout, layer, self._slots, key[0], key[0])
        if index is not None:
            chosen = torch.empty(count, form.most, dtype=torch.int32, device=query.device)
            choose(self._cache, layout, layer, self._tables, index, form, self._max_context, chosen)
            starts = torch.arange(0, count * form.most, form.most, dtype=torch.int32, device=query.device)
            lens = self._tables.context_lens
            lens = torch.minimum(lens, form.count + lens % form.pool)
            self._chosen = DecodeTables(lens, starts, chosen.flatten())
        if self._chosen is None:
            raise ValueError("no layer before this one has chosen tokens")
        out = torch.empty(*query.shape[:2], layout.value_dim, dtype=query.dtype, device=query.device)
        decode_attention(
            query,
            self._cache,
            layout,
            layer,
            self._chosen,
            self._scale,
            None,
            None,
            False,
            sinks,
            self._splits,
            out,
            chosen=True,
        )
        return out


def plan_tokens(
    rows: Sequence[AttentionRow], block_size: int, device: torch.device
) -> tuple[torch.Tensor, DecodeTables, int]:
    """Returns the slots of the rows' new tokens, the context of each of them, and the length of the longest."""
    tables = [block_ids(row.blocks, -(-row.context_len // block_size)) for row in rows]
    counts = [row.new_tokens for row in rows]
    ends = np.cumsum([0, *(len(table) for table in tables)])[:-1]
    lengths = [np.arange(row.context_len - row.new_tokens, row.context_len, dtype=np.int32) + 1 for row in rows]
    slots, lens, starts, blocks = to_device(
        [new_slots(rows, block_size), joined(lengths), np.repeat(ends, counts), joined(tables)], device
    )
    return slots, DecodeTables(lens, starts, blocks), max(row.context_len for row in rows)
