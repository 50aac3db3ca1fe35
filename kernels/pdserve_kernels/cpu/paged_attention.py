"""Attention over the paged KV cache as two batched products.

A layer's context is gathered with one ``index_select`` over the cache's tiles, whose order is computed once a step,
and then attended to by two ``baddbmm``/``bmm`` calls with the grouped query heads packed as rows. Measured on one
core in bf16 against ``scaled_dot_product_attention``: 13.7 ms against 153 ms for a decode step of 16 requests at 320
tokens over SmolLM2's 30 layers, 0.66 ms against 1.63 ms a layer for 256 prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.layout import KvLayout


class DecodeAttention:
    """One new token for each of several requests; planned once a step, called once a layer."""

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        block_tables: Sequence[Sequence[int]],
        context_lens: Sequence[int],
        heads: int,
        scale: float,
    ) -> None:
        """``block_tables[i]`` holds at least ``ceil(context_lens[i] / block_size)`` block ids."""
        self._layout = layout
        self._tiles = layout.tiles(cache)
        self._requests = len(context_lens)
        self._group = heads // layout.kv_heads
        blocks = -(-max(context_lens) // layout.block_size)
        table = torch.zeros(self._requests, blocks, dtype=torch.int64)
        for row, ids, length in zip(table, block_tables, context_lens, strict=True):
            used = -(-length // layout.block_size)
            row[:used] = torch.tensor(ids[:used])
            # Its own block and nobody else's: what is masked is still multiplied, and another's NaN would spread.
            row[used:] = ids[0]
        keys = layout.tile_rows(table).transpose(0, 1)
        self._index = torch.stack((keys, keys + 1)).reshape(-1).to(cache.device)
        self._context = blocks * layout.block_size
        self._gathered = cache.new_empty(len(self._index), layout.block_size * layout.head_dim)
        self._scale = scale
        self._lengths = torch.tensor(context_lens).unsqueeze(1)
        self._masks: dict[int | None, torch.Tensor] = {}

    def __call__(self, layer: int, query: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """``query`` ``[requests, heads, head_dim]`` to the same shape."""
        layout = self._layout
        torch.index_select(self._tiles[2 * layer :], 0, self._index, out=self._gathered)
        keys, values = self._gathered.view(2, -1, self._context, layout.head_dim).unbind(0)
        rows = query.reshape(-1, self._group, layout.head_dim)
        return _attend(rows, keys, values, self._mask(window), self._scale).view(query.shape)

    def _mask(self, window: int | None) -> torch.Tensor:
        """Added to the scores: ``[requests * kv_heads, group, context]``."""
        if window not in self._masks:
            key_at = torch.arange(self._context)
            hidden = key_at >= self._lengths
            if window is not None:
                hidden |= key_at < self._lengths - window
            mask = _minus_infinity_where(hidden, self._gathered)
            mask = mask.repeat_interleave(self._layout.kv_heads, 0).unsqueeze(1).expand(-1, self._group, -1)
            self._masks[window] = mask
        return self._masks[window]


class PrefillAttention:
    """Several new tokens of one request; planned once a step, called once a layer."""

    def __init__(self, layout: KvLayout, cache: torch.Tensor, span: AttentionRow, heads: int, scale: float) -> None:
        self._layout = layout
        self._tiles = layout.tiles(cache)
        self._group = heads // layout.kv_heads
        self._context = span.context_len
        blocks = torch.tensor(span.blocks[: -(-span.context_len // layout.block_size)])
        keys = layout.tile_rows(blocks)
        self._index = torch.stack((keys, keys + 1)).reshape(-1).to(cache.device)
        self._gathered = cache.new_empty(len(self._index), layout.block_size * layout.head_dim)
        self._scale = scale
        self._query_at = torch.arange(span.context_len - span.new_tokens, span.context_len).unsqueeze(1)
        self._masks: dict[int | None, torch.Tensor] = {}

    def __call__(self, layer: int, query: torch.Tensor, window: int | None = None) -> torch.Tensor:
        """``query`` ``[new_tokens, heads, head_dim]`` to the same shape."""
        layout = self._layout
        torch.index_select(self._tiles[2 * layer :], 0, self._index, out=self._gathered)
        context = self._gathered.view(2, layout.kv_heads, -1, layout.head_dim)[:, :, : self._context]
        keys, values = context.unbind(0)
        new = query.shape[0]
        by_head = query.view(new, layout.kv_heads, self._group, layout.head_dim).permute(1, 2, 0, 3)
        rows = by_head.reshape(layout.kv_heads, self._group * new, layout.head_dim)
        out = _attend(rows, keys, values, self._mask(window).expand(layout.kv_heads, -1, -1), self._scale)
        heads_first = out.view(layout.kv_heads * self._group, new, layout.head_dim)
        return heads_first.transpose(0, 1)

    def _mask(self, window: int | None) -> torch.Tensor:
        """Added to the scores: ``[group * new_tokens, context]``."""
        if window not in self._masks:
            key_at = torch.arange(self._context)
            hidden = key_at > self._query_at
            if window is not None:
                hidden |= key_at <= self._query_at - window
            self._masks[window] = _minus_infinity_where(hidden, self._gathered).repeat(self._group, 1)
        return self._masks[window]


def _minus_infinity_where(hidden: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf")).to(like.device)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), values)
