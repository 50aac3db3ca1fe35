"""Computes latent attention (DeepSeek-V2, 2024): all heads' keys and values come from one short vector of a token.

Only this latent is kept, with the part of the key that is turned by its position, which heads share. So the cache has
one key of ``rank + turned`` channels a token, whose first ``rank`` are its value, and every rank has the whole of it.
The products that would expand latents to keys and values are applied to queries and results instead: attention to all
heads is attention to that one key. Rows of many tokens take less time with expanded contexts (``latent_plan``).

DeepSeek-V3.2 (2025) attends to some tokens alone. An indexer of few, short heads scores all tokens of a context by one
more key of each, which stands behind the first one in the cache: so it is sent, kept and given back with it.

Layers of Mistral Large 4 (2026) that know no positions keep zeros in place of the part that is turned, so that one
cache has them all, and those that have the latents of an earlier layer keep these once more.

DeepSeek-V4 (2026) has one vector of a token that is the key and the value of all heads, of which a token sees those of
a window, and beside them entries that stand for several tokens each, or for overlapping ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.weights import ALL
from pdserve.models.latent_plan import LatentStep, widened
from pdserve.models.parts.feed_forward import gate_heads
from pdserve.models.parts.norms import LoadedNorm, load_norm
from pdserve.models.parts.projections import Building, Projection, RowParallel, SideBySide, column_parallel
from pdserve.models.parts.rotary import PositionTables, channel_order
from pdserve.models.recipe import (
    AttentionRecipe,
    EntriesRecipe,
    EntryIndexRecipe,
    HeadScales,
    IndexRecipe,
    LatentRecipe,
    Norm,
)
from pdserve.models.shared_plan import SharedStep
from pdserve.models.tp.shares import share, spread
from pdserve_kernels.contract import HeadLinear, IndexQueries, Linear


class LatentAttention:
    """The latent attention of the layer that is ``index`` of its cache group."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: AttentionRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        assert recipe.latent is not None
        self._latent = latent = recipe.latent
        self.source = latent.key_from
        """The layer whose latents this one has, too; None if it makes its own."""
        self._indexer = None
        if latent.index is not None and not latent.index.shared:
            self._indexer = Indexer(config.hidden_size, building, latent, latent.index, prefix)
        self._index, self._kernels = index, building.kernels
        heads = share(building.tp, config.heads, "attention heads")
        self._heads = heads.stop - heads.start
        order = channel_order(recipe.rotary, latent.turned)
        turned = tuple(range(latent.turned)) if order is None else order
        query = _query(config, recipe, prefix, heads, turned)
        key = None if self.source is not None else _key(recipe, prefix, turned)
        self._query_norm: LoadedNorm | None = None
        self._query_up: Linear | None = None
        if latent.query_rank:
            down = Projection(prefix + latent.query_down, latent.query_rank, ALL, latent.query_down in recipe.biased)
            self._inner = _side_by_side(building, config.hidden_size, down, key)
            self._query_norm = load_norm(building, latent.norm, prefix + latent.query_norm, latent.query_rank)
            self._query_up = column_parallel(building, latent.query_rank * (2 if latent.query_pair else 1), [query])
        else:
            self._inner = _side_by_side(building, config.hidden_size, query, key)
        self._norm: LoadedNorm | None = None
        if key is not None:
            self._norm = load_norm(building, latent.norm, prefix + latent.key_norm, latent.rank)
        self._scales: _HeadScaling | None = None
        if latent.head_scales is not None:
            assert recipe.gate is None, "gates that come with queries are not multiplied"
            self._scales = _HeadScaling(building, latent.head_scales, prefix, config.heads, heads)
        self._to_latent, self._to_key, self._to_value = _products(config, building, recipe, prefix, heads)
        self._gate, self._gates = recipe.gate, None
        if recipe.gate is not None and recipe.gate.name:
            each = 1 if recipe.gate.one else latent.value
            gates = Projection(prefix + recipe.gate.name, config.heads * each, spread(heads, each))
            self._gates = column_parallel(building, config.hidden_size, [gates])
        self._sinks: torch.Tensor | None = None
        if recipe.sinks:
            self._sinks = building.checkpoint.take(prefix + recipe.sinks, (config.heads,), heads, dtype=torch.float32)
        whole = (config.hidden_size, config.heads * latent.value)
        biased = recipe.out in recipe.biased
        self._out = RowParallel(building, prefix + recipe.out, whole, spread(heads, latent.value), biased=biased)

    def __call__(
        self, x: torch.Tensor, tables: PositionTables, step: LatentStep, given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape, and to the tokens' latents.

        ``given`` are those of the layer that is ``source``, ``[tokens, channels]``, if there is one.
        """
        sizes, tokens, heads = self._latent, x.shape[0], self._heads
        inner, made = self._inner(x), 0 if given is not None else sizes.rank + sizes.turned
        query, latent = torch.split(inner, [inner.shape[1] - made, made], 1)
        down = query
        if self._query_norm is not None and self._query_up is not None:
            down = self._query_norm(query.contiguous())
            query = self._query_up(torch.cat((down, query), -1) if sizes.query_pair else down)
        if sizes.query_scale != 1.0:
            query = query * sizes.query_scale
        query = query.reshape(tokens, heads, -1)
        if self._scales is not None:
            query = self._scales(query, tables)
        of_head = [sizes.plain, sizes.turned, query.shape[-1] - sizes.plain - sizes.turned]
        plain, turned, gates = torch.split(query, of_head, -1)
        turned, latent = self._kept(turned, latent, tables) if given is None else (self._rotated(turned, tables), given)
        if tables.query_scale is not None:
            plain, turned = plain * tables.query_scale, turned * tables.query_scale
        key = latent if self._indexer is None else torch.cat((latent, self._indexer.keys(x, tables)), -1)
        # A layer that takes another one's choice keeps as many channels as the others.
        key = widened(key, sizes.kept).view(1, tokens, 1, -1)
        if step.pools is not None and self._indexer is not None:
            assert self._indexer.pool_bias is not None, "a step has pools if indexers have"
            step.pools(self._index, key, self._indexer.pool_bias)
        index = None
        if self._indexer is not None and step.sparse is not None:
            index = self._indexer.queries(x, down, tables)
        if step.direct is None:
            values = self._direct(plain, turned, key, step, index)
        else:
            values = plain.new_empty(tokens, heads, sizes.value)
            if step.attention is not None:
                own = step.direct
                values[own] = self._direct(plain[own], turned[own], key[:, own], LatentStep(step.attention), None)
            for row in step.expanded:
                query = torch.cat((plain[row.tokens], turned[row.tokens]), -1)
                products = self._to_key, self._to_value
                values[row.tokens] = row(self._index, sizes, query, key[:, row.tokens], *products, self._sinks)
            if step.sparse is not None and step.chosen is not None:
                own, some = step.chosen, None if index is None else index.of(step.chosen)
                alone = LatentStep(None, sparse=step.sparse)
                values[own] = self._direct(plain[own], turned[own], key[:, own], alone, some)
        if self._gate is not None:
            given = gates.reshape(tokens, -1) if self._gates is None else self._gates(x)
            values = gate_heads(self._kernels, given, values, self._gate.activation)
        return self._out(values.reshape(tokens, -1)), latent

    def _kept(
        self, turned: torch.Tensor, latent: torch.Tensor, tables: PositionTables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the part of queries that is turned, ``[tokens, heads, turned]``, and what is kept of tokens.

        ``latent`` is ``[tokens, rank + turned]`` as it is projected, and the result ``[tokens, channels]``.
        """
        sizes = self._latent
        assert self._norm is not None, "a layer without latents of its own is given some"
        latent, shared = torch.split(latent, [sizes.rank, sizes.turned], 1)
        rotated = self._rotated(torch.cat((turned, shared.unsqueeze(1)), 1), tables)
        normed = self._norm(latent.contiguous())
        kept = torch.cat((normed if sizes.scale == 1.0 else normed * sizes.scale, rotated[:, -1]), -1)
        return rotated[:, :-1], widened(kept, sizes.channels)

    def _rotated(self, heads: torch.Tensor, tables: PositionTables) -> torch.Tensor:
        return self._kernels.rotary(heads.contiguous(), tables.cos, tables.sin) if self._latent.turned else heads

    def _direct(
        self,
        plain: torch.Tensor,
        turned: torch.Tensor,
        key: torch.Tensor,
        step: LatentStep,
        index: IndexQueries | None,
    ) -> torch.Tensor:
        """Returns the values of heads, ``[tokens, heads, value]``, by attention to latents of one kind."""
        queries = widened(torch.cat((self._to_latent(plain), turned), -1), self._latent.channels)
        if step.sparse is not None:
            return self._to_value(step.sparse(self._index, queries, key, index, sinks=self._sinks))
        assert step.attention is not None, "a step has rows"
        # Queries have no part for index keys.
        return self._to_value(step.attention(self._index, widened(queries, key.shape[-1]), key, sinks=self._sinks))


class Indexer:
    """Makes what tokens are chosen by: a key of each token, and its queries. Every rank has the whole of it."""

    def __init__(
        self, hidden_size: int, building: Building, latent: LatentRecipe, index: IndexRecipe, prefix: str
    ) -> None:
        """Takes the tensors whose names begin with ``prefix``."""
        self._index, self._turned, self._kernels = index, latent.turned, building.kernels
        channels, heads = index.channels, index.heads
        self._query_norm: LoadedNorm | None = None
        if index.query_norm:
            self._query_norm = load_norm(building, index.norm, prefix + index.query_norm, hidden_size)
        wide = Projection(prefix + index.query, heads * channels, ALL)
        self._query = column_parallel(building, hidden_size if index.query_norm else latent.query_rank, [wide])
        self._scales: _HeadScaling | None = None
        if index.head_scales is not None:
            self._scales = _HeadScaling(building, index.head_scales, prefix, heads, slice(0, heads))
        self._key = column_parallel(building, hidden_size, [Projection(prefix + index.key, channels, ALL)])
        self._norm = load_norm(building, index.norm, prefix + index.key_norm, channels)
        weights = building.checkpoint.take(f"{prefix}{index.weights}.weight", (heads, hidden_size), dtype=torch.float32)
        self._weights = building.kernels.linear(weights)
        self._factor = (channels * heads) ** -0.5
        self.pool_bias: torch.Tensor | None = None
        """fp32 ``[pool, channels]``; None if tokens are chosen one by one."""
        self._gate: Linear | None = None
        if index.pool > 1:
            bias = prefix + index.pool_bias
            self.pool_bias = building.checkpoint.take(bias, (index.pool, channels), dtype=torch.float32)
            gate = building.checkpoint.take(prefix + index.pool_gate, (channels, hidden_size))
            self._gate = building.kernels.linear(gate)

    def keys(self, x: torch.Tensor, tables: PositionTables) -> torch.Tensor:
        """Maps the layer's input, ``[tokens, hidden_size]``, to ``[tokens, kept]``."""
        keys = self._rotated(self._norm(self._key(x)).unsqueeze(1), tables).squeeze(1)
        return keys if self._gate is None else torch.cat((keys, self._gate(x)), -1)

    def queries(self, x: torch.Tensor, down: torch.Tensor, tables: PositionTables) -> IndexQueries:
        """Returns what index keys are scored by. ``down``, ``[tokens, query_rank]``, is what queries come from."""
        query = self._query(down if self._query_norm is None else self._query_norm(x))
        query = query.view(len(x), self._index.heads, self._index.channels)
        if self._scales is not None:
            query = self._scales(query, tables)
        return IndexQueries(self._rotated(query, tables), self._weights(x.float()) * self._factor)

    def _rotated(self, heads: torch.Tensor, tables: PositionTables) -> torch.Tensor:
        """Turns some channels of ``[tokens, heads, channels]``."""
        if not self._turned:
            return heads
        if self._index.turns_last:
            still, turned = heads[..., : -self._turned], heads[..., -self._turned :]
        else:
            turned, still = heads[..., : self._turned], heads[..., self._turned :]
        if self._index.interleaved:
            turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
        turned = self._kernels.rotary(turned.contiguous(), tables.cos, tables.sin)
        return torch.cat((still, turned) if self._index.turns_last else (turned, still), -1)


class _HeadScaling:
    """Multiplies the queries of some of ``count`` heads by ``HeadScales``."""

    def __init__(self, building: Building, recipe: HeadScales, prefix: str, count: int, heads: slice) -> None:
        taken = (building.checkpoint.take(prefix + name, (count,), heads) for name in (recipe.scale, recipe.bias))
        self._scale, self._bias = (each.view(-1, 1) for each in taken)

    def __call__(self, query: torch.Tensor, tables: PositionTables) -> torch.Tensor:
        """Maps ``[tokens, heads, channels]`` to the same shape."""
        assert tables.logs is not None, "a model with such heads has the logarithms of positions"
        return query * (self._scale * tables.logs + self._bias)


def _key(recipe: AttentionRecipe, prefix: str, turned: tuple[int, ...]) -> Projection:
    """Returns the projection to a token's latent and to the part of its key that is turned."""
    latent = recipe.latent
    assert latent is not None
    rows = (*range(latent.rank), *(latent.rank + channel for channel in turned))
    return Projection(prefix + recipe.key, len(rows), rows, recipe.key in recipe.biased)


def _query(
    config: FamilyConfig, recipe: AttentionRecipe, prefix: str, heads: slice, turned: tuple[int, ...]
) -> Projection:
    """Returns the projection to this rank's queries, each with its head's gates behind it if they come from it."""
    latent = recipe.latent
    assert latent is not None
    size = latent.plain + latent.turned
    each = (*range(latent.plain), *(latent.plain + channel for channel in turned))
    if recipe.gate is not None and not recipe.gate.name:
        each, size = (*each, *range(size, size + latent.value)), size + latent.value
    rows = tuple(head * size + channel for head in range(heads.start, heads.stop) for channel in each)
    return Projection(prefix + recipe.query, config.heads * size, rows, recipe.query in recipe.biased)


def _side_by_side(building: Building, inputs: int, first: Projection, second: Projection | None) -> Linear:
    """Returns both projections as one product, unless only one of them has a bias, or there is no second one."""
    if second is None:
        return column_parallel(building, inputs, [first])
    if first.biased == second.biased:
        return column_parallel(building, inputs, [first, second])
    return SideBySide(tuple(column_parallel(building, inputs, [each]) for each in (first, second)))


def _products(
    config: FamilyConfig, building: Building, recipe: AttentionRecipe, prefix: str, heads: slice
) -> tuple[HeadLinear, HeadLinear, HeadLinear]:
    """Returns the products of each head: its query to one of latents, and a latent to its key and to its value."""
    latent = recipe.latent
    assert latent is not None

    def taken(name: str, size: int, inputs: int) -> torch.Tensor:
        """Returns this rank's heads, ``[heads, size, inputs]``."""
        shape = (config.heads * size, inputs)
        weight = building.checkpoint.take(f"{prefix}{name}.weight", shape, rows=spread(heads, size))
        return weight.view(-1, size, inputs)

    if latent.key_up:
        queries, values = (
            taken(latent.key_up, latent.rank, latent.plain),
            taken(latent.value_up, latent.value, latent.rank),
        )
        keys = queries.transpose(1, 2)
    else:
        weight = taken(recipe.value, latent.plain + latent.value, latent.rank)
        keys, values = torch.split(weight, [latent.plain, latent.value], 1)
        queries = keys.transpose(1, 2)
    linear = building.kernels.head_linear
    return linear(queries.contiguous()), linear(keys.contiguous()), linear(values.contiguous())


class SharedKvAttention:
    """Attention to one vector of a token (``SharedKvRecipe``), of the layer that is ``index`` of its cache group.

    A rank has some of the heads, and makes all vectors and entries.
    """

    def __init__(
        self,
        config: FamilyConfig,
        building: Building,
        recipe: AttentionRecipe,
        prefix: str,
        index: int,
        entries: int | None,
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``. ``entries`` is the number of its entries."""
        shared, window, hidden = recipe.shared, recipe.window, config.hidden_size
        assert shared is not None and window is not None and recipe.sinks, "such layers have windows and sinks"
        self._shared, self._window, self._index, self._number = shared, window, index, entries
        self._channels = channels = config.head_dim
        groups = share(building.tp, shared.groups, "groups of heads")
        of_group = config.heads // shared.groups
        heads = spread(groups, of_group)
        self._heads, self._groups = heads.stop - heads.start, groups.stop - groups.start
        made = [] if shared.entries is None else [shared.entries]
        made += [] if shared.index is None else [shared.index.entries]
        wide = [
            Projection(prefix + name, each.parts * each.channels, ALL)
            for each in made
            for name in (each.value, each.gate)
        ]
        down = Projection(prefix + shared.query_down, shared.query_rank, ALL)
        self._inner = column_parallel(building, hidden, [down, Projection(prefix + recipe.key, channels, ALL), *wide])
        self._widths = [shared.query_rank, channels, *(each.outputs for each in wide)]
        self._query_norm = load_norm(building, shared.norm, prefix + shared.query_norm, shared.query_rank)
        query = Projection(prefix + recipe.query, config.heads * channels, spread(heads, channels))
        self._query = column_parallel(building, shared.query_rank, [query])
        self._norm = load_norm(building, shared.norm, prefix + shared.key_norm, channels)
        shape = (shared.groups * shared.group_rank, of_group * channels)
        weight = building.checkpoint.take(
            f"{prefix}{shared.group_out}.weight", shape, spread(groups, shared.group_rank)
        )
        self._group_out = building.kernels.head_linear(weight.view(self._groups, shared.group_rank, -1))
        whole = (hidden, shape[0])
        self._out = RowParallel(building, prefix + recipe.out, whole, spread(groups, shared.group_rank), biased=False)
        self._sinks = building.checkpoint.take(prefix + recipe.sinks, (config.heads,), heads, dtype=torch.float32)
        self._made = _Entries(building, made, shared.norm, prefix) if made else None
        self._indexer = (
            None if shared.index is None else _EntryIndex(hidden, building, shared.index, shared.query_rank, prefix)
        )

    def __call__(
        self,
        x: torch.Tensor,
        tables: PositionTables,
        whole: PositionTables,
        step: SharedStep,
        group: int,
        states: torch.Tensor | None,
        state_group: int | None,
    ) -> torch.Tensor:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape.

        ``whole`` are the tables of all positions, and ``states``, of ``state_group``, those of the layer's entries.
        """
        shared, tokens = self._shared, x.shape[0]
        down, vectors, *wide = torch.split(self._inner(x), self._widths, 1)
        down = self._query_norm(down.contiguous())
        query = self._query(down).view(tokens, self._heads, self._channels)
        query = turned(
            F.rms_norm(query, (self._channels,), None, shared.norm.eps), tables.cos, tables.sin, shared.turned
        )
        vectors = turned(self._norm(vectors.contiguous()).unsqueeze(1), tables.cos, tables.sin, shared.turned)
        step.store(group, self._index, vectors.squeeze(1))
        index, most = None, 0
        if self._made is not None and states is not None and state_group is not None and self._number is not None:
            making = step.making(self._made.every, state_group)
            sums = making(*self._made.parted(wide), states)
            if len(sums):
                entries = self._made(sums, whole.at(making.positions), shared.turned)
                step.store_entries(self._number, making, entries)
        if self._indexer is not None:
            index, most = self._indexer(x, down, tables, shared.turned), self._indexer.most
        attended = step(group, self._index, self._window, query, self._sinks, self._number, index, most)
        attended = turned(attended, tables.cos, -tables.sin, shared.turned)
        grouped: torch.Tensor = self._group_out(attended.reshape(tokens, self._groups, -1))
        return self._out(grouped.reshape(tokens, -1))


class _Entries:
    """What entries of one or two kinds are made with: those that are attended to, and those that choose among them."""

    def __init__(self, building: Building, recipes: Sequence[EntriesRecipe], norm: Norm, prefix: str) -> None:
        self._parts, self._sizes = recipes[0].parts, [each.channels for each in recipes]
        self.every = recipes[0].every
        biases = []
        for each in recipes:
            shape = (self.every, each.parts * each.channels)
            biases.append(building.checkpoint.take(prefix + each.bias, shape, dtype=torch.float32))
        self._bias = self._together(biases)
        self._norms = [load_norm(building, norm, prefix + each.norm, each.channels) for each in recipes]
        self._dtype = building.checkpoint.dtype

    def parted(self, wide: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns vectors, gates and biases as ``EntryMaking`` takes them.

        ``wide`` are the vectors and the gates of each kind, ``[tokens, parts * channels]``.
        """
        return self._together(wide[::2]), self._together(wide[1::2]), self._bias

    def _together(self, kinds: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns those of all kinds, fp32 ``[rows, parts, all channels]``."""
        return torch.cat([each.float().view(len(each), self._parts, -1) for each in kinds], -1)

    def __call__(self, sums: torch.Tensor, tables: PositionTables, width: int) -> torch.Tensor:
        """Maps what ``EntryMaking`` gave to entries, ``[entries, all channels]``, normalised and turned."""
        kinds = torch.split(sums.to(self._dtype), self._sizes, 1)
        normed = [norm(each.contiguous()).unsqueeze(1) for norm, each in zip(self._norms, kinds, strict=True)]
        return torch.cat([turned(each, tables.cos, tables.sin, width).squeeze(1) for each in normed], 1)


class _EntryIndex:
    """Makes what entries are chosen by. Every rank has the whole of it."""

    def __init__(
        self, hidden_size: int, building: Building, recipe: EntryIndexRecipe, query_rank: int, prefix: str
    ) -> None:
        channels, heads = recipe.entries.channels, recipe.heads
        self.most = recipe.count
        """The most entries that a token sees."""
        self._heads, self._channels = heads, channels
        self._query = column_parallel(building, query_rank, [Projection(prefix + recipe.query, heads * channels, ALL)])
        shape = (heads, hidden_size)
        weights = building.checkpoint.take(f"{prefix}{recipe.weights}.weight", shape, dtype=torch.float32)
        self._weights = building.kernels.linear(weights)
        self._factor = (channels * heads) ** -0.5

    def __call__(self, x: torch.Tensor, down: torch.Tensor, tables: PositionTables, width: int) -> IndexQueries:
        """Returns what index entries are scored by. ``down``, ``[tokens, query_rank]``, is what queries come from."""
        query = self._query(down).view(len(x), self._heads, self._channels)
        return IndexQueries(turned(query, tables.cos, tables.sin, width), self._weights(x.float()) * self._factor)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int) -> torch.Tensor:
    """Turns neighbours of the last ``width`` channels of ``x``, ``[tokens, heads, channels]``, against each other.

    ``cos`` and ``sin`` are ``[tokens, width / 2]``.
    """
    still, pairs = torch.split(x, [x.shape[-1] - width, width], -1)
    first, second = pairs.float().reshape(*x.shape[:2], width // 2, 2).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    both = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((still, both.flatten(-2).to(x.dtype)), -1)
