"""Checks attention to chosen tokens against its definition, for any kernel set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow, IndexQueries, Kernels, SparseForm
from pdserve_kernels.kv_layout import KvLayout

CPU = torch.device("cpu")
INDEX_HEADS = 5


@dataclass(frozen=True)
class SparseStep:
    """One step: its rows, and what its tokens are given in one layer.

    All numbers by which tokens are chosen are whole and small, so that scores are exact and many of them are equal.
    """

    layout: KvLayout
    form: SparseForm
    rows: Sequence[AttentionRow]
    cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    index: IndexQueries
    scale: float
    sinks: torch.Tensor | None = None
    """Those of all layers but the second."""

    def on(self, device: torch.device) -> SparseStep:
        index = IndexQueries(self.index.query.to(device), self.index.weights.to(device))
        parts = (self.cache.to(device), self.query.to(device), self.key.to(device))
        sinks = None if self.sinks is None else self.sinks.to(device)
        return SparseStep(self.layout, self.form, self.rows, *parts, index, self.scale, sinks)

    def indexed(self, layer: int) -> bool:
        """Returns whether a layer chooses. The second one takes what the first one has chosen."""
        return layer != 1

    def attended(self, kernels: Kernels, cache: torch.Tensor) -> torch.Tensor:
        """Returns the attention of all layers, ``[layers, tokens, heads, value_dim]``, and writes ``cache``."""
        attend = kernels.plan_sparse(self.layout, cache, self.rows, self.query.shape[1], self.scale, self.form)
        given = [self.index if self.indexed(layer) else None for layer in range(self.layout.num_layers)]
        return torch.stack(
            [
                attend(layer, self.query, self.key, index, sinks=self.sinks_of(layer))
                for layer, index in enumerate(given)
            ]
        )

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        return None if layer == 1 else self.sinks

    def of(self, tokens: Sequence[int]) -> SparseStep:
        """Returns a step of some tokens, each a row of its own."""
        each = [
            AttentionRow(1, row.context_len - row.new_tokens + 1 + new, row.blocks)
            for row in self.rows
            for new in range(row.new_tokens)
        ]
        place = torch.tensor(tokens)
        given = (self.query[place], self.key[:, place], self.index.of(place))
        rows = [each[token] for token in tokens]
        return SparseStep(self.layout, self.form, rows, self.cache, *given, self.scale, self.sinks)


def random_step(
    layout: KvLayout,
    rows: Sequence[AttentionRow],
    heads: int,
    count: int,
    blocks: int,
    channels: int,
    *,
    sinks: bool = False,
    pool: int = 1,
) -> SparseStep:
    """Returns a step in which each token attends to ``count``. The last ``channels`` of a key are its index key.

    With a ``pool``, tokens attend to so many pools.
    """
    form = SparseForm(count * pool, layout.head_dim - channels, pool)
    tokens, dtype = sum(row.new_tokens for row in rows), layout.dtype
    cache = torch.randn(blocks, 1, layout.num_layers, 1, layout.block_size, layout.head_dim).to(dtype)
    key = torch.randn(1, tokens, 1, layout.head_dim).to(dtype)
    for each in (cache, key):
        each[..., form.first :] = torch.randint(-2, 3, (*each.shape[:-1], channels)).to(dtype)
    if layout.fp8:
        numbers, exponents = reference.quantised(cache)
        cache = torch.cat((numbers.flatten(-2), exponents), -1)
    query = torch.randn(tokens, heads, form.first).to(dtype)
    # Of pools, not all channels are a key.
    channels -= 1 if pool > 1 else 0
    chosen_by = torch.randint(-2, 3, (tokens, INDEX_HEADS, channels)).to(dtype)
    weights = torch.randint(-2, 4, (tokens, INDEX_HEADS)).float()
    beside = torch.randn(heads) if sinks else None
    return SparseStep(layout, form, rows, cache, query, key, IndexQueries(chosen_by, weights), form.first**-0.5, beside)


def defined(step: SparseStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what ``SparseStep.attended`` has to give, in fp32, and the cache behind it."""
    layout, form, cache = step.layout, step.form, step.cache.clone()
    slots = [
        row.blocks[at // layout.block_size] * layout.block_size + at % layout.block_size
        for row in step.rows
        for at in range(row.context_len - row.new_tokens, row.context_len)
    ]
    for layer in range(layout.num_layers):
        reference.kv_write(cache, layout, layer, torch.tensor(slots), step.key[0], step.key[0])
    out = torch.zeros(layout.num_layers, *step.query.shape[:2], layout.value_dim)
    taken = dict[int, torch.Tensor]()
    for layer in range(layout.num_layers):
        token = 0
        for row in step.rows:
            whole = reference.stored(cache[list(row.blocks), 0, layer, 0], layout).reshape(-1, layout.head_dim)
            for end in range(row.context_len - row.new_tokens + 1, row.context_len + 1):
                if step.indexed(layer):
                    query, weights = step.index.query[token], step.index.weights[token]
                    keys = whole[form.pool - 1 : end : form.pool, form.first : form.first + query.shape[1]]
                    pools = reference.chosen(reference.index_scores(query, weights, keys), form.count // form.pool)
                    places = pools.unsqueeze(1) * form.pool + torch.arange(form.pool)
                    behind = torch.arange(end - end % form.pool, end)
                    taken[token] = torch.cat((places.flatten(), behind))
                found = whole[taken[token]].float()
                scores = step.query[token].float() @ found[:, : form.first].T * step.scale
                sinks = step.sinks_of(layer)
                if sinks is not None:
                    scores = torch.cat((scores, sinks.unsqueeze(1)), 1)
                out[layer, token] = scores.softmax(-1)[:, : len(found)] @ found[:, : layout.value_dim]
                token += 1
    return out, cache
