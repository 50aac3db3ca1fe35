"""Computes a layer's attention, with this rank's heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from pdserve.models.block_plan import BlockStep, HeadBlockStep
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.weights import ALL, Rows
from pdserve.models.parts.feed_forward import gate_heads
from pdserve.models.parts.norms import load_norm, norm_of_all
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.parts.rotary import PositionTables, channel_order
from pdserve.models.recipe import AttentionRecipe, Fusion, HeadBlockIndex, HeadNorm, Norm, NormKind, NormScope
from pdserve.models.tp.shares import kv_share, share, spread
from pdserve_kernels.contract import Attention, HeadNorms, StateRuns

QUERY, KEY, VALUE = range(3)


class SelfAttention:
    """The attention of the layer that is ``index`` of its cache group."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: AttentionRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        tp, config = building.tp, config.of_layer(recipe)
        self._index, self._kernels = index, building.kernels
        self._window, self._chunked = recipe.window, recipe.chunked
        self._head_dim = config.head_dim
        self._value_dim, self._value_scale = recipe.value_dim or config.head_dim, recipe.value_scale
        assert self._value_dim == config.head_dim or not (recipe.gate or recipe.fused or recipe.norms_apart)
        heads = share(tp, config.heads, "attention heads")
        kv_heads = kv_share(tp, config.heads, config.kv_heads)
        self._kv_heads = kv_heads.stop - kv_heads.start
        self._heads = heads.stop - heads.start
        self._gate, self._gates = recipe.gate, 0
        """How heads are gated, and the numbers of all gates, which stand before the queries."""
        if recipe.gate is not None:
            self._gates = self._heads * (1 if recipe.gate.one else config.head_dim)
        self._order = channel_order(recipe.rotary, config.head_dim)
        assert recipe.value or self._order is None, "values that are keys have the order of the checkpoint"
        parts = _projections(config, recipe, prefix, heads, kv_heads, self._order)
        self._qkv = column_parallel(building, config.hidden_size, parts)
        whole = (config.hidden_size, config.heads * self._value_dim)
        columns, biased = spread(heads, self._value_dim), recipe.out in recipe.biased
        self._out = RowParallel(
            building, prefix + recipe.out, whole, columns, biased=biased, transposed=recipe.transposed
        )
        self._sinks: torch.Tensor | None = None
        if recipe.sinks:
            self._sinks = building.checkpoint.take(
                prefix + recipe.sinks, (config.heads,), rows=heads, dtype=torch.float32
            )
        self._norms: HeadNorms | None = None
        self._apart: _StepsApart | None = None
        if recipe.norms_apart:
            self._apart = _StepsApart(config, building, recipe, prefix, self._order)
        elif recipe.norms is not None:
            self._norms = self._head_norms(building, recipe.norms, prefix)

    def __call__(self, x: torch.Tensor, tables: PositionTables, attention: Attention) -> torch.Tensor:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape."""
        gates, qkv = self._inner(x)
        if self._apart is None:
            if tables.query_scale is not None:
                # What is rotated later is turned by the same angle whatever its length.
                qkv[:, : qkv.shape[1] - 2 * self._kv_heads] *= tables.query_scale
            attended = attention.from_projection(
                self._index,
                qkv,
                tables.cos,
                tables.sin,
                self._norms,
                self._window,
                chunked=self._chunked,
                sinks=self._sinks,
            )
        else:
            attended = self._attended(qkv, tables, attention, self._apart)
        return self._put_out(attended, gates)

    def _put_out(self, attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Maps the results of heads, ``[tokens, heads, head_dim]``, to ``[tokens, hidden_size]``."""
        tokens = len(attended)
        if self._gate is not None:
            attended = attended.view(tokens, self._heads, -1)
            attended = gate_heads(self._kernels, gates, attended, self._gate.activation)
        if self._value_dim != self._head_dim:
            attended = attended.view(tokens, -1, self._head_dim)[..., : self._value_dim]
        return self._out(attended.reshape(tokens, -1))

    def _inner(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all gates, ``[tokens, n]``, and what ``_by_head`` makes of queries, keys and values."""
        projected = self._qkv(x)
        return projected[:, : self._gates], self._by_head(projected[:, self._gates :])

    def _by_head(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns what is projected as ``[tokens, heads, head_dim]``, with zeros behind values that are narrower."""
        tokens, dim = qkv.shape[0], self._head_dim
        if self._value_dim == dim and self._value_scale == 1.0:
            return qkv.view(tokens, -1, dim)
        query_key, value = torch.split(qkv, [qkv.shape[1] - (size := self._kv_heads * self._value_dim), size], 1)
        value = value.view(tokens, -1, self._value_dim) * self._value_scale
        return torch.cat((query_key.view(tokens, -1, dim), F.pad(value, (0, dim - self._value_dim))), 1)

    def _attended(
        self, qkv: torch.Tensor, tables: PositionTables, attention: Attention, steps: _StepsApart
    ) -> torch.Tensor:
        """Computes attention with steps that no kernel has in one with the rotation."""
        query, key, value = self._parted(qkv, steps)
        if not steps.after_rotary:
            query, key = steps.query(query), key if key is None else steps.key(key)
        turned = query if key is None else torch.cat((query, key), 1)
        rotated = self._kernels.rotary(turned, tables.cos, tables.sin)
        query, key = rotated[:, : query.shape[1]], key if key is None else rotated[:, query.shape[1] :]
        if steps.after_rotary:
            query, key = steps.query(query), key if key is None else steps.key(key)
        if tables.query_scale is not None:
            query = query * tables.query_scale
        key_value = None if key is None or value is None else torch.stack((key, steps.value(value)))
        return attention(
            self._index, query.contiguous(), key_value, self._window, chunked=self._chunked, sinks=self._sinks
        )

    def _parted(
        self, qkv: torch.Tensor, steps: _StepsApart
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns queries, keys and values; None for those of another layer."""
        if steps.reads:
            return qkv, None, None
        kv = self._kv_heads
        if steps.one:
            query, key = torch.split(qkv, [qkv.shape[1] - kv, kv], 1)
            return query, key, key
        query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * kv, kv, kv], 1)
        return query, key, value

    def _head_norms(self, building: Building, norms: HeadNorm, prefix: str) -> HeadNorms:
        def weight(name: str) -> torch.Tensor:
            if not norms.norm.weighted:
                return torch.ones(self._head_dim, dtype=building.checkpoint.dtype, device=building.checkpoint.device)
            taken = building.checkpoint.take(f"{prefix}{name}.weight", (self._head_dim,))
            return _ordered(taken + norms.norm.offset, self._order)

        return HeadNorms(weight(norms.query), weight(norms.key), norms.norm.eps)


class BlockAttention(SelfAttention):
    """Attention to chosen blocks of tokens (``BlockIndexRecipe``), of the layer that is ``index`` of its cache group.

    A rank has some of the heads, and makes the keys of all blocks.
    """

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: AttentionRecipe, prefix: str, index: int, number: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``. ``number`` is that of its keys of blocks."""
        super().__init__(config, building, recipe, prefix, index)
        assert recipe.blocks is not None and recipe.rotary is not None and self._norms is not None
        assert recipe.window is None and recipe.query_scale is None and not recipe.sinks
        self._blocks, self._number = recipe.blocks, number
        channels = self._blocks.channels
        self._turned = recipe.rotary.width or config.head_dim
        """The channels of an index key that are turned."""
        outputs = (self._blocks.heads + 1) * channels
        projection = Projection(prefix + self._blocks.projection, outputs, ALL)
        self._project = column_parallel(building, config.hidden_size, [projection])
        self._query_norm, self._key_norm = (
            load_norm(building, self._blocks.norm, prefix + name, channels)
            for name in (self._blocks.query_norm, self._blocks.key_norm)
        )
        shape = (self._blocks.every, 1, channels)
        self._taps = torch.ones(shape, dtype=torch.float32, device=building.checkpoint.device)

    def of_blocks(
        self,
        x: torch.Tensor,
        tables: PositionTables,
        whole: PositionTables,
        step: BlockStep,
        states: torch.Tensor | None,
        runs: StateRuns | None,
    ) -> torch.Tensor:
        """Does what ``__call__`` does. ``whole`` are the tables of all positions.

        ``states`` are those of the layer; None if a block is one token.
        """
        gates, qkv = self._inner(x)
        index = self._project(x).view(len(x), self._blocks.heads + 1, self._blocks.channels)
        self._store_keys(index[:, -1], whole, step, states, runs)
        some = step.chosen
        if some is None:
            return self._put_out(self._seeing_all(qkv, tables, step), gates)
        if step.attention is None:
            return self._put_out(self._choosing(qkv, index, tables, step), gates)
        attended = qkv.new_empty(len(x), self._heads, self._head_dim)
        others = step.direct
        attended[others] = self._seeing_all(qkv[others], tables.at(others), step)
        attended[some] = self._choosing(qkv[some], index[some], tables.at(some), step)
        return self._put_out(attended, gates)

    def _seeing_all(self, qkv: torch.Tensor, tables: PositionTables, step: BlockStep) -> torch.Tensor:
        assert step.attention is not None
        found = step.attention.from_projection(self._index, qkv, tables.cos, tables.sin, self._norms)
        return found.view(len(qkv), self._heads, -1)

    def _choosing(
        self, qkv: torch.Tensor, index: torch.Tensor, tables: PositionTables, step: BlockStep
    ) -> torch.Tensor:
        """Stores keys and values of the tokens that choose, and attends, as ``_seeing_all`` does in one."""
        norms = self._norms
        assert norms is not None
        kv, normed = self._kv_heads, self._kernels.rms_norm
        query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * kv, kv, kv], 1)
        query, key = normed(query, norms.query, norms.eps), normed(key, norms.key, norms.eps)
        query, key = torch.split(
            self._kernels.rotary(torch.cat((query, key), 1), tables.cos, tables.sin), [query.shape[1], kv], 1
        )
        step.store(self._index, torch.stack((key, value)))
        normed_index = self._query_norm(index[:, :-1].contiguous())
        return step(self._index, self._number, query.contiguous(), self._rotated(normed_index, tables))

    def _store_keys(
        self,
        keys: torch.Tensor,
        whole: PositionTables,
        step: BlockStep,
        states: torch.Tensor | None,
        runs: StateRuns | None,
    ) -> None:
        """Stores the keys of the blocks that become complete, by those of all tokens, ``[tokens, channels]``."""
        every, means = self._blocks.every, keys
        if states is not None and runs is not None:
            before = states.view(-1, 1, every - 1, self._blocks.channels)
            # The mean of the last tokens, of which those of the last one of a block are used.
            sums = self._kernels.causal_conv(keys.float().unsqueeze(1), self._taps, None, before, runs, silu=False)
            means = sums.squeeze(1) / every
        if len(step.ended):
            normed = self._key_norm(means[step.ended].to(keys.dtype))
            turned = self._rotated(normed.unsqueeze(1), whole.at(step.positions))
            step.store_keys(self._number, turned.squeeze(1))

    def _rotated(self, heads: torch.Tensor, tables: PositionTables) -> torch.Tensor:
        """Turns the first channels of ``[tokens, heads, channels]``."""
        turned, still = heads[..., : self._turned], heads[..., self._turned :]
        angles = (tables.cos[:, : self._turned // 2], tables.sin[:, : self._turned // 2])
        return torch.cat((self._kernels.rotary(turned.contiguous(), *angles), still), -1)


class HeadBlockAttention:
    """The attention of a layer that is ``index`` of its cache group, with ``HeadBlocksRecipe``."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: AttentionRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        blocks, tp = recipe.head_blocks, building.tp
        assert blocks is not None, "such layers have a recipe of blocks"
        config = replace(config, head_dim=blocks.head_dim)
        self._index, self._kernels, self._blocks = index, building.kernels, blocks
        heads, kv_heads = share(tp, config.heads, "attention heads"), kv_share(tp, config.heads, config.kv_heads)
        self._heads, self._kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        order = channel_order(recipe.rotary, blocks.head_dim)
        parts = _projections(config, recipe, prefix, heads, kv_heads, order)
        self._qkv = column_parallel(building, config.hidden_size, parts)
        self._steps = _StepsApart(config, building, recipe, prefix, order)
        whole = (config.hidden_size, config.heads * blocks.head_dim)
        self._out = RowParallel(building, prefix + recipe.out, whole, spread(heads, blocks.head_dim), biased=False)
        self._indexer: _HeadBlockIndexer | None = None
        if blocks.index is not None:
            turned = blocks.head_dim if recipe.rotary is None else recipe.rotary.width or blocks.head_dim
            self._indexer = _HeadBlockIndexer(config, building, blocks.index, prefix, kv_heads, turned)

    def __call__(self, x: torch.Tensor, tables: PositionTables, step: HeadBlockStep) -> torch.Tensor:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape."""
        dim, beside, kv = self._blocks.head_dim, self._blocks.beside, self._kv_heads
        qkv = self._qkv(x).view(len(x), -1, dim)
        query, key, value = torch.split(qkv, [self._heads, kv, kv], 1)
        both = torch.cat((self._steps.query(query), self._steps.key(key)), 1)
        query, key = torch.split(self._kernels.rotary(both, tables.cos, tables.sin), [self._heads, kv], 1)
        key_value, index = torch.stack((key, value)), None
        if self._indexer is None:
            key_value = F.pad(key_value, (0, beside))
        else:
            index, index_key = self._indexer(x, tables)
            halves = index_key.view(len(x), 2, 1, beside).transpose(0, 1).expand(-1, -1, kv, -1)
            key_value = torch.cat((key_value, halves), -1)
        return self._out(step(self._index, query, key_value, index).reshape(len(x), -1))


class _HeadBlockIndexer:
    """Makes what blocks are chosen by: the queries of this rank's KV heads, and a key of each token."""

    def __init__(
        self,
        config: FamilyConfig,
        building: Building,
        recipe: HeadBlockIndex,
        prefix: str,
        kv_heads: slice,
        turned: int,
    ) -> None:
        """Takes the tensors whose names begin with ``prefix``. The first ``turned`` channels are turned."""
        self._kernels, self._channels, self._turned = building.kernels, recipe.channels, turned
        count = config.kv_heads * recipe.channels
        query = Projection(prefix + recipe.query, count, spread(kv_heads, recipe.channels))
        key = Projection(prefix + recipe.key, recipe.channels, slice(0, recipe.channels))
        self._both = column_parallel(building, config.hidden_size, [query, key])
        self._query_norm = load_norm(building, recipe.norm, prefix + recipe.query_norm, recipe.channels)
        self._key_norm = load_norm(building, recipe.norm, prefix + recipe.key_norm, recipe.channels)

    def __call__(self, x: torch.Tensor, tables: PositionTables) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries ``[tokens, kv_heads, channels]``, and keys ``[tokens, channels]``."""
        both = self._both(x)
        query, key = torch.split(both, [both.shape[1] - self._channels, self._channels], 1)
        query = self._query_norm(query.reshape(-1, self._channels)).view(len(x), -1, self._channels)
        key = self._key_norm(key.contiguous()).unsqueeze(1)
        turned, still = torch.split(torch.cat((query, key), 1), [self._turned, self._channels - self._turned], -1)
        cos, sin = (each[:, : self._turned // 2].contiguous() for each in (tables.cos, tables.sin))
        heads = torch.cat((self._kernels.rotary(turned.contiguous(), cos, sin), still), -1)
        return heads[:, :-1], heads[:, -1]


HeadStep = Callable[[torch.Tensor], torch.Tensor]
"""Maps ``[tokens, heads, head_dim]`` to the same shape."""


class _StepsApart:
    """What normalises queries, keys and values by operations of their own."""

    def __init__(
        self,
        config: FamilyConfig,
        building: Building,
        recipe: AttentionRecipe,
        prefix: str,
        order: tuple[int, ...] | None,
    ) -> None:
        self.reads, self.one = recipe.kv_from is not None, not recipe.value
        """Whether there are queries alone, and whether values are the keys."""
        norms, tp = recipe.norms, building.tp
        self.after_rotary = norms is not None and norms.after_rotary
        self.query: HeadStep = _as_it_is
        self.key: HeadStep = _as_it_is
        self.value: HeadStep = (
            _as_it_is if recipe.value_norm is None else _plain_norm(recipe.value_norm, config.head_dim)
        )
        if norms is None:
            return
        heads = share(tp, config.heads, "attention heads")
        name = f"{prefix}{norms.query}"
        self.query = _norm_apart(building, norms, name, (config.heads, config.head_dim), heads, order)
        if not self.reads:
            kv_heads = kv_share(tp, config.heads, config.kv_heads)
            # Ranks that hold the same key head would count it several times.
            copies = max(1, tp.size // config.kv_heads)
            name = f"{prefix}{norms.key}"
            self.key = _norm_apart(building, norms, name, (config.kv_heads, config.head_dim), kv_heads, order, copies)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _plain_norm(norm: Norm, head_dim: int) -> HeadStep:
    return lambda x: F.rms_norm(x, (head_dim,), None, norm.eps)


def _norm_apart(
    building: Building,
    norms: HeadNorm,
    name: str,
    shape: tuple[int, int],
    mine: slice,
    order: tuple[int, ...] | None,
    copies: int = 1,
) -> HeadStep:
    """Returns the normalisation of this rank's heads, of all those of ``shape``, ``(heads, head_dim)``."""
    checkpoint, norm, (heads, head_dim) = building.checkpoint, norms.norm, shape
    stored = {NormScope.HEAD: (head_dim,), NormScope.EACH_HEAD: shape, NormScope.ALL: (heads * head_dim,)}[norms.scope]
    weight = bias = None
    if norm.weighted:
        weight = checkpoint.take(f"{name}.weight", stored) + norm.offset
        weight = _ordered(weight if norms.scope is NormScope.HEAD else weight.view(shape)[mine], order)
    if norm.biased:
        bias = checkpoint.take(f"{name}.bias", stored)
        bias = _ordered(bias if norms.scope is NormScope.HEAD else bias.view(shape)[mine], order)
    if norms.scope is not NormScope.ALL:

        def by_head(x: torch.Tensor) -> torch.Tensor:
            if norm.kind is NormKind.LAYER:
                normed = F.layer_norm(x, (head_dim,), None, None, norm.eps)
            else:
                normed = F.rms_norm(x, (head_dim,), None, norm.eps)
            normed = normed if weight is None else normed * weight
            return normed if bias is None else normed + bias

        return by_head
    assert norm.kind is NormKind.RMS and weight is not None
    flat = weight.reshape(-1).contiguous()
    tp, kernels = building.tp, building.kernels

    def of_all(x: torch.Tensor) -> torch.Tensor:
        joined = x.reshape(x.shape[0], -1)
        return norm_of_all(tp, kernels, joined, flat, heads * head_dim, norm.eps, copies).view(x.shape)

    return of_all


def _ordered(weights: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Returns weights ``[..., head_dim]`` in the order in which this rank has the channels of a head."""
    return weights if order is None else weights[..., torch.tensor(order, device=weights.device)].contiguous()


def _projections(
    config: FamilyConfig,
    recipe: AttentionRecipe,
    prefix: str,
    heads: slice,
    kv_heads: slice,
    order: tuple[int, ...] | None,
) -> list[Projection]:
    """Returns the projections to this rank's gates, queries, keys and values, in this order."""
    dim = config.head_dim
    names = (recipe.query, recipe.key, recipe.value)
    mine = (heads, kv_heads, kv_heads)
    if recipe.fused:
        rows: list[int] = []
        for part, range_of in enumerate(mine):
            for head in range(range_of.start, range_of.stop):
                start = _fused_row(recipe.fusion, part, head, config)
                own = order if order is not None and part != VALUE else tuple(range(dim))
                rows += [start + channel for channel in own]
        total = (config.heads + 2 * config.kv_heads) * dim
        all_rows: Rows = slice(0, total) if rows == list(range(total)) else tuple(rows)
        return [Projection(prefix + recipe.fused, total, all_rows, recipe.fused in recipe.biased, recipe.transposed)]
    counts = (config.heads, config.kv_heads, config.kv_heads)
    found = []
    for part, (name, range_of, count) in enumerate(zip(names, mine, counts, strict=True)):
        if not name or (part != QUERY and recipe.kv_from is not None):
            continue
        channels = dim if part != VALUE else recipe.value_dim or dim
        wanted: Rows = spread(range_of, channels)
        if order is not None and part != VALUE:
            wanted = tuple(head * dim + channel for head in range(range_of.start, range_of.stop) for channel in order)
        gate = recipe.gate if part == QUERY else None
        if gate is not None and gate.name:
            size = 1 if gate.one else dim
            found.append(Projection(prefix + gate.name, count * size, spread(range_of, size)))
        elif gate is not None:
            own = order if order is not None else tuple(range(dim))
            heads_here = range(range_of.start, range_of.stop)
            gates = [(2 * head + 1) * dim + channel for head in heads_here for channel in range(dim)]
            count *= 2
            wanted = (*gates, *(2 * head * dim + channel for head in heads_here for channel in own))
        found.append(Projection(prefix + name, count * channels, wanted, name in recipe.biased, recipe.transposed))
    return found


def _fused_row(fusion: Fusion, part: int, head: int, config: FamilyConfig) -> int:
    """Returns the first row of a head in the tensor that holds all queries, keys and values."""
    dim, group = config.head_dim, config.heads // config.kv_heads
    if fusion is Fusion.PARTS:
        return (head + (0, config.heads, config.heads + config.kv_heads)[part]) * dim
    if part == QUERY:
        return (head // group * (group + 2) + head % group) * dim
    return (head * (group + 2) + group + part - KEY) * dim
