"""Attends to chosen tokens: each token's are gathered from the cache as a context of their own.

In a cache whose keys have the values in them, the row of one token is a block of one token, so that the attention of a
kernel set needs no other form to read rows that lie anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pdserve_kernels import reference
from pdserve_kernels.contract import Attention, AttentionRow, IndexQueries, SparseForm, check_choosing
from pdserve_kernels.host_copies import block_ids, joined
from pdserve_kernels.kv_layout import KvLayout

Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of some tokens, as rows of ``KvLayout.tokens`` in layer 0."""

    lengths: Ids
    """``[tokens]``"""
    starts: Ids
    """``[tokens]``: where each token's context begins in ``rows``, which tokens of one request share."""
    rows: Ids

    def of(self, token: int) -> Ids:
        """Returns the context of a token."""
        start = int(self.starts[token])
        return self.rows[start : start + int(self.lengths[token])]

    @property
    def newest(self) -> Ids:
        """Returns the row of each token itself."""
        newest: Ids = self.rows[self.starts + self.lengths - 1]
        return newest


class Pools:
    """The pools of some contexts (``SparseForm.pool``)."""

    def __init__(self, contexts: Contexts, form: SparseForm) -> None:
        self._contexts, self._form = contexts, form
        complete = contexts.lengths // form.pool
        firsts, request = np.unique(contexts.starts, return_inverse=True)
        counts = np.zeros(len(firsts), np.int32)
        np.maximum.at(counts, request, complete)
        begins = (np.cumsum(counts, dtype=np.int32) - counts).astype(np.int32)
        ends = [first + form.pool * (np.arange(count) + 1) - 1 for first, count in zip(firsts, counts, strict=True)]
        self._last = torch.from_numpy(contexts.rows[np.concatenate(ends)]).long()
        """The row of each pool's last token."""
        self._each = Contexts(complete, begins[request], np.arange(len(self._last), dtype=np.int32))

    def chosen(self, tokens: torch.Tensor, index: IndexQueries, choose: Choose) -> Ids:
        """Returns what ``Choose`` does, ``[tokens, most]``: chosen pools, and what is behind the last one."""
        form, contexts = self._form, self._contexts
        keys = tokens[self._last, form.first : form.first + index.query.shape[2]]
        count = form.count // form.pool
        found = choose(keys, self._each, index, SparseForm(count, 0)) - self._each.starts[:, None]
        within = (found[:, :, None] * form.pool + np.arange(form.pool)).reshape(len(found), -1)
        within = np.pad(within, ((0, 0), (0, form.pool - 1)))
        complete, place = self._each.lengths[:, None], np.arange(form.most)
        taken = np.minimum(complete, count) * form.pool
        at = np.where(place < taken, within, complete * form.pool + place - taken)
        rows: Ids = contexts.rows[contexts.starts[:, None] + np.clip(at, 0, contexts.lengths[:, None] - 1)]
        return rows


Choose = Callable[[torch.Tensor, Contexts, IndexQueries, SparseForm], Ids]
"""Takes the rows of a layer, and returns those that each token attends to, ``[tokens, count]``, of layer 0.

A token whose context is shorter has as many as its context; what is behind them means nothing.
"""
Plan = Callable[[KvLayout, torch.Tensor, Sequence[AttentionRow], int, float], Attention]
"""``contract.Kernels.plan_attention``"""


class GatheredAttention:
    """Satisfies ``contract.SparseAttention``, with the attention and the choice of a kernel set."""

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        form: SparseForm,
        plan: Plan,
        choose: Choose,
    ) -> None:
        self._layout, self._heads, self._scale, self._form = layout, heads, scale, form
        self._plan, self._choose = plan, choose
        check_choosing(layout, form)
        self._contexts = contexts = contexts_of(rows, layout)
        self._pools = None if form.pool == 1 else Pools(contexts, form)
        self._counts = np.minimum(contexts.lengths, form.count + contexts.lengths % form.pool).tolist()
        self._new = torch.from_numpy(self._contexts.newest).long()
        self._one = replace(layout, num_layers=1, block_size=1)
        if layout.fp8:
            self._one = replace(self._one, head_dim=form.first)
            self._numbers, self._exponents = layout.split(layout.tiles(cache))
        else:
            self._tokens = layout.tokens(cache)
        self._chosen: Ids | None = None

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
        layout, first = self._layout, layer * self._layout.block_size
        if layout.fp8:
            return self._in_fp8(layer, query, key, index, sinks)
        self._tokens[first:].index_copy_(0, self._new, key.reshape(-1, layout.head_dim))
        if index is not None:
            tokens = self._tokens[first:]
            if self._pools is None:
                self._chosen = self._choose(tokens, self._contexts, index, self._form)
            else:
                self._chosen = self._pools.chosen(tokens, index, self._choose)
        rows = self._tokens.view(-1, 1, 1, 1, 1, layout.head_dim)
        query = F.pad(query, (0, layout.head_dim - self._form.first))
        return self._attend(query, rows, self._known + np.int32(first), sinks)

    def _in_fp8(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        index: IndexQueries | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Copies the rows that any token attends to: in the cache, an exponent does not lie beside its numbers."""
        first, rows = self._form.first, self._contexts.rows
        new, at = self._places(layer, self._contexts.newest), self._places(layer, rows)
        self._numbers[new], self._exponents[new] = reference.quantised(key.reshape(-1, self._layout.head_dim))
        if index is not None:
            keys = reference.dequantised(self._numbers[..., first:][at], self._exponents[at], self._layout.dtype)
            contexts = replace(self._contexts, rows=np.arange(len(rows), dtype=np.int32))
            self._chosen = self._choose(keys, contexts, index, SparseForm(self._form.count, 0))
        attended = np.zeros(len(rows), bool)
        attended[self._known] = True
        at = self._places(layer, rows[attended])
        packed = torch.cat((self._numbers[..., :first][at], self._exponents[at].unsqueeze(1)), 1)
        ids = attended.cumsum(dtype=np.int32) - np.int32(1)
        return self._attend(query, packed.view(-1, 1, 1, 1, first + 1), ids[self._known], sinks)

    def _places(self, layer: int, rows: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tiles of these rows of layer 0 in ``layer``, and where they lie in these."""
        tiles, offsets = np.divmod(rows.astype(np.int64), self._layout.block_size)
        return torch.from_numpy(tiles + layer), torch.from_numpy(offsets)

    @property
    def _known(self) -> Ids:
        if self._chosen is None:
            raise ValueError("no layer before this one has chosen tokens")
        return self._chosen

    def _attend(self, query: torch.Tensor, rows: torch.Tensor, chosen: Ids, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attends to ``rows``, each a block of one token, of which each token has its ``chosen`` ones."""
        found = [AttentionRow(1, count, ids[:count]) for count, ids in zip(self._counts, chosen, strict=True)]
        return self._plan(self._one, rows, found, self._heads, self._scale)(0, query, None, sinks=sinks)


def contexts_of(rows: Sequence[AttentionRow], layout: KvLayout) -> Contexts:
    """Returns the contexts of the rows' new tokens."""
    size = layout.block_size
    parts, lengths, starts, begin = [], [], [], 0
    for row in rows:
        at = np.arange(row.context_len, dtype=np.int32)
        blocks = block_ids(row.blocks, -(-row.context_len // size))[at // size]
        parts.append(blocks * np.int32(layout.num_layers * size) + at % size)
        lengths.append(at[row.context_len - row.new_tokens :] + 1)
        starts.append(np.full(row.new_tokens, begin, np.int32))
        begin += row.context_len
    return Contexts(joined(lengths), joined(starts), joined(parts))


def choose_plainly(tokens: torch.Tensor, contexts: Contexts, index: IndexQueries, form: SparseForm) -> Ids:
    """Chooses as ``reference`` does, token by token."""
    out = np.zeros((len(contexts.lengths), form.count), np.int32)
    for token, (query, weights) in enumerate(zip(index.query, index.weights, strict=True)):
        rows = contexts.of(token)
        keys = tokens[:, form.first :].index_select(0, torch.from_numpy(rows))
        places = reference.chosen(reference.index_scores(query, weights, keys), form.count).numpy()
        out[token, : len(places)] = rows[places]
    return out
