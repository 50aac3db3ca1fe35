"""Computes a step's attention with one compiled call for each layer, without a gathered copy of the context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pdserve_kernels.contract import (
    AttentionRow,
    HeadNorms,
    IndexQueries,
    SparseForm,
    check_window,
    widest_window,
)
from pdserve_kernels.cpu.library import CIndex, CStep, CTokens, Library
from pdserve_kernels.cpu.sparse_attention import Contexts, Ids
from pdserve_kernels.host_copies import block_ids, joined
from pdserve_kernels.kv_layout import KvLayout

MAX_HEAD_DIM = 1024
"""The same limit as ``kMaxHeadDim`` of csrc/attention.h."""


class CompiledAttention:
    """Satisfies ``contract.Attention`` for bf16 and fp32."""

    def __init__(
        self,
        library: Library,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        cap: float | None = None,
    ) -> None:
        singles = sum(row.new_tokens == 1 for row in rows)
        if any(row.new_tokens == 1 for row in rows[singles:]):
            raise ValueError("rows with one token must come before rows with several")
        if layout.head_dim > MAX_HEAD_DIM or heads % layout.kv_heads or not cache.is_contiguous():
            raise ValueError(f"{heads} heads do not fit the KV cache {layout}")
        self._attend, self._layout, self._heads = library.attend, layout, heads
        self._form = int(layout.dtype is torch.bfloat16) + 2 * layout.fp8
        self._cache = cache
        self._widest = widest_window(rows, layout.block_size)
        self._tables, self._rows, self._num_tokens = _tables(rows, layout.block_size, cache.shape[0])
        self._step = CStep(
            cache=cache.data_ptr(),
            tables=self._tables.data_ptr(),
            rows=self._rows.data_ptr(),
            num_rows=len(rows),
            num_singles=singles,
            num_tokens=self._num_tokens,
            kv_heads=layout.kv_heads,
            heads=heads,
            layers=layout.num_layers,
            block_size=layout.block_size,
            head_dim=layout.head_dim,
            tiles=layout.tiles_a_layer,
            scale=scale,
            cap=cap or 0.0,
        )
        self._step_at = ctypes.addressof(self._step)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key_value: torch.Tensor | None,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        layout = self._layout
        query = self._checked(query, self._heads)
        if key_value is None:
            tokens = CTokens(query=query.data_ptr(), query_stride=self._heads * layout.head_dim)
            return self._run(tokens, layer, window, chunked, sinks)
        if len(key_value) != layout.tiles_a_layer:
            raise ValueError(
                f"attention wants {layout.tiles_a_layer} of keys and values, and was given {len(key_value)}"
            )
        key_value = key_value.contiguous()
        key, value = self._checked(key_value[0], layout.kv_heads), self._checked(key_value[-1], layout.kv_heads)
        tokens = CTokens(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            query_stride=self._heads * layout.head_dim,
            key_stride=layout.kv_heads * layout.head_dim,
        )
        return self._run(tokens, layer, window, chunked, sinks)

    def from_projection(
        self,
        layer: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None = None,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        layout = self._layout
        width = self._heads + 2 * layout.kv_heads
        qkv = self._checked(qkv, width)
        element, dim = layout.dtype.itemsize, layout.head_dim
        at = qkv.data_ptr()
        key_at = at + self._heads * dim * element
        tables = self._table(cos), self._table(sin)
        tokens = CTokens(
            query=at,
            key=key_at,
            value=key_at + layout.kv_heads * dim * element,
            query_stride=width * dim,
            key_stride=width * dim,
            cos=tables[0].data_ptr(),
            sin=tables[1].data_ptr(),
        )
        if norms is None:
            return self._run(tokens, layer, window, chunked, sinks)
        weights = self._norm(norms.query), self._norm(norms.key)
        tokens.query_norm, tokens.key_norm = (weight.data_ptr() for weight in weights)
        tokens.eps = norms.eps
        return self._run(tokens, layer, window, chunked, sinks)

    def _run(
        self, tokens: CTokens, layer: int, window: int | None, chunked: bool, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        layout = self._layout
        if not 0 <= layer < layout.num_layers:
            raise IndexError(f"layer {layer} of {layout.num_layers}")
        if self._widest is not None:
            check_window(window, self._widest)
        out = torch.empty((self._num_tokens, self._heads, layout.head_dim), dtype=layout.dtype)
        tokens.layer, tokens.window, tokens.chunked, tokens.out = layer, window or 0, chunked, out.data_ptr()
        if sinks is not None:
            sinks = _contiguous(sinks, (self._heads,), torch.float32)
            tokens.sinks = sinks.data_ptr()
        self._attend(self._form, self._step_at, ctypes.addressof(tokens))
        return out[..., : layout.value_dim] if layout.shared_channels else out

    def _checked(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return _contiguous(x, (self._num_tokens, heads, self._layout.head_dim), self._layout.dtype)

    def _table(self, x: torch.Tensor) -> torch.Tensor:
        return _contiguous(x, (self._num_tokens, self._layout.head_dim // 2), self._layout.dtype)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return _contiguous(x, (self._layout.head_dim,), self._layout.dtype)


def _contiguous(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if x.shape != shape or x.dtype is not dtype:
        raise ValueError(f"attention wants {dtype} {shape}, and was given {x.dtype} {tuple(x.shape)}")
    return x.contiguous()


def _tables(rows: Sequence[AttentionRow], block_size: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns all block ids, and each row's new tokens, context length, first token, and start of its block ids."""
    parts = []
    shapes: list[tuple[int, int, int, int]] = []
    tokens = begin = 0
    for row in rows:
        used = block_ids(row.blocks, -(-row.context_len // block_size) - row.first_block)
        left_out = row.first_block * block_size
        held = len(used) * block_size
        if left_out + held < row.context_len or not 1 <= row.new_tokens <= row.context_len - left_out:
            raise ValueError(f"{len(used)} blocks do not hold {row.new_tokens} of {row.context_len} tokens")
        # The kernel counts a row's blocks from the beginning of its context, and reads none that is left out.
        shapes.append((row.new_tokens, row.context_len, tokens, begin - row.first_block))
        parts.append(used)
        begin += len(used)
        tokens += row.new_tokens
    blocks = joined(parts)
    if begin and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise IndexError(f"a block table names a block beyond the {num_blocks} of the cache")
    return torch.from_numpy(blocks), torch.tensor(shapes, dtype=torch.int32), tokens


@dataclass(frozen=True, slots=True)
class CompiledChoice:
    """Chooses by one compiled call. What a token chooses does not depend on the other tokens."""

    library: Library

    def __call__(self, tokens: torch.Tensor, contexts: Contexts, index: IndexQueries, form: SparseForm) -> Ids:
        count, heads, channels = index.query.shape
        known = form.first + channels == tokens.shape[1] and index.weights.shape == (count, heads)
        if not known or count != len(contexts.lengths) or index.query.dtype is not tokens.dtype:
            raise ValueError(f"queries {tuple(index.query.shape)} do not fit keys of {tokens.shape[1] - form.first}")
        if index.weights.dtype is not torch.float32:
            raise ValueError(f"weights of heads are fp32, and not {index.weights.dtype}")
        if contexts.rows.size and not 0 <= contexts.rows.min() <= contexts.rows.max() < len(tokens):
            raise IndexError(f"a context has a row beyond the {len(tokens)} of the cache")
        query, weights = index.query.contiguous(), index.weights.contiguous()
        out = np.zeros((count, form.count), np.int32)
        given = CIndex(
            tokens=tokens.data_ptr(),
            rows=contexts.rows.ctypes.data,
            lengths=contexts.lengths.ctypes.data,
            starts=contexts.starts.ctypes.data,
            query=query.data_ptr(),
            weights=weights.data_ptr(),
            chosen=out.ctypes.data,
            num_tokens=count,
            row_size=tokens.shape[1],
            first=form.first,
            heads=heads,
            channels=channels,
            count=form.count,
        )
        self.library.choose(int(tokens.dtype is torch.bfloat16), ctypes.addressof(given))
        return out
