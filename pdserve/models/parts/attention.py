"""Computes a layer's attention, with this rank's heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.weights import Rows
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.parts.rotary import PositionTables, channel_order
from pdserve.models.recipe import AttentionRecipe, Fusion, HeadNorm, NormKind, NormScope
from pdserve.models.tp.shares import kv_share, share, spread
from pdserve_kernels.contract import Attention, HeadNorms

QUERY, KEY, VALUE = range(3)


class SelfAttention:
    """The attention of layer ``index``."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: AttentionRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        if recipe.kv_from is not None:
            raise ModelError(f"{prefix.rstrip('.')} attends to another layer's keys and values, which is not supported")
        tp, config = building.tp, config.of_layer(recipe)
        self._index, self._window, self._kernels = index, recipe.window, building.kernels
        self._head_dim = config.head_dim
        heads = share(tp, config.heads, "attention heads")
        kv_heads = kv_share(tp, config.heads, config.kv_heads)
        self._kv_heads = kv_heads.stop - kv_heads.start
        self._order = channel_order(recipe.rotary, config.head_dim)
        parts = _projections(config, recipe, prefix, heads, kv_heads, self._order)
        self._qkv = column_parallel(building, config.hidden_size, parts)
        shape = (config.hidden_size, config.heads * config.head_dim)
        columns, biased = spread(heads, config.head_dim), recipe.out in recipe.biased
        self._out = RowParallel(
            building, prefix + recipe.out, shape, columns, biased=biased, transposed=recipe.transposed
        )
        self._norms: HeadNorms | None = None
        self._apart: _NormsApart | None = None
        norms = recipe.norms
        if norms is not None:
            if recipe.norms_apart:
                self._apart = _NormsApart(config, building, norms, prefix, self._order)
            else:
                self._norms = self._head_norms(building, norms, prefix)

    def __call__(self, x: torch.Tensor, tables: PositionTables, attention: Attention) -> torch.Tensor:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape."""
        tokens = x.shape[0]
        qkv = self._qkv(x).view(tokens, -1, self._head_dim)
        if self._apart is None:
            if tables.query_scale is not None:
                # What is rotated later is turned by the same angle whatever its length.
                qkv[:, : qkv.shape[1] - 2 * self._kv_heads] *= tables.query_scale
            attended = attention.from_projection(self._index, qkv, tables.cos, tables.sin, self._norms, self._window)
        else:
            attended = self._attended(qkv, tables, attention, self._apart)
        return self._out(attended.reshape(tokens, -1))

    def _attended(
        self, qkv: torch.Tensor, tables: PositionTables, attention: Attention, norms: _NormsApart
    ) -> torch.Tensor:
        """Computes attention with norms that no kernel has in one with the rotation."""
        sizes = [qkv.shape[1] - 2 * self._kv_heads, self._kv_heads, self._kv_heads]
        query, key, value = torch.split(qkv, sizes, 1)
        if not norms.after_rotary:
            query, key = norms(query, key)
        rotated = self._kernels.rotary(torch.cat((query, key), 1), tables.cos, tables.sin)
        query, key = torch.split(rotated, sizes[:2], 1)
        if norms.after_rotary:
            query, key = norms(query, key)
        if tables.query_scale is not None:
            query = query * tables.query_scale
        return attention(self._index, query.contiguous(), torch.stack((key, value)), self._window)

    def _head_norms(self, building: Building, norms: HeadNorm, prefix: str) -> HeadNorms:
        def weight(name: str) -> torch.Tensor:
            taken = building.checkpoint.take(f"{prefix}{name}.weight", (self._head_dim,))
            return _ordered(taken + norms.norm.offset, self._order)

        return HeadNorms(weight(norms.query), weight(norms.key), norms.norm.eps)


class _NormsApart:
    """Normalises queries and keys, ``[tokens, heads, head_dim]``, by operations of their own."""

    def __init__(
        self, config: FamilyConfig, building: Building, norms: HeadNorm, prefix: str, order: tuple[int, ...] | None
    ) -> None:
        self.after_rotary = norms.after_rotary
        tp = building.tp
        heads = share(tp, config.heads, "attention heads")
        kv_heads = kv_share(tp, config.heads, config.kv_heads)
        # Ranks that hold the same key head would count it several times.
        copies = max(1, tp.size // config.kv_heads)
        self._query = _norm_apart(
            building, norms, f"{prefix}{norms.query}", (config.heads, config.head_dim), heads, order
        )
        self._key = _norm_apart(
            building, norms, f"{prefix}{norms.key}", (config.kv_heads, config.head_dim), kv_heads, order, copies
        )

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._query(query), self._key(key)


def _norm_apart(
    building: Building,
    norms: HeadNorm,
    name: str,
    shape: tuple[int, int],
    mine: slice,
    order: tuple[int, ...] | None,
    copies: int = 1,
) -> Callable[[torch.Tensor], torch.Tensor]:
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
        if tp.size == 1:
            return kernels.rms_norm(joined, flat, norm.eps).view(x.shape)
        squares = tp.all_reduce(joined.float().square().sum(-1, keepdim=True) / copies)
        factor = torch.rsqrt(squares / (heads * head_dim) + norm.eps)
        return ((joined.float() * factor).to(x.dtype) * flat).view(x.shape)

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
    """Returns the projections to this rank's queries, keys and values, in this order."""
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
        wanted: Rows = slice(0, total) if rows == list(range(total)) else tuple(rows)
        return [Projection(prefix + recipe.fused, total, wanted, recipe.fused in recipe.biased, recipe.transposed)]
    counts = (config.heads, config.kv_heads, config.kv_heads)
    found = []
    for part, (name, range_of, count) in enumerate(zip(names, mine, counts, strict=True)):
        wanted = spread(range_of, dim)
        if order is not None and part != VALUE:
            wanted = tuple(head * dim + channel for head in range(range_of.start, range_of.stop) for channel in order)
        found.append(Projection(prefix + name, count * dim, wanted, name in recipe.biased, recipe.transposed))
    return found


def _fused_row(fusion: Fusion, part: int, head: int, config: FamilyConfig) -> int:
    """Returns the first row of a head in the tensor that holds all queries, keys and values."""
    dim, group = config.head_dim, config.heads // config.kv_heads
    if fusion is Fusion.PARTS:
        return (head + (0, config.heads, config.heads + config.kv_heads)[part]) * dim
    if part == QUERY:
        return (head // group * (group + 2) + head % group) * dim
    return (head * (group + 2) + group + part - KEY) * dim
