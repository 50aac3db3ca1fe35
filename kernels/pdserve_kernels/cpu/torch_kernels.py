"""The kernel set of a CPU without a compiler: plain torch, with packed weights if oneDNN has them.

Attention is two batched products. A layer's context is gathered with one ``index_select`` over the cache's tiles, whose
order is computed once a step, and then attended to by two ``baddbmm``/``bmm`` calls with the grouped query heads packed
as rows. On one core in bf16, this was measured to take 13.7 ms where ``scaled_dot_product_attention`` takes 153 ms for
a decode step of 16 requests at 320 tokens over SmolLM2's 30 layers, and 0.66 ms where it takes 1.63 ms for one layer of
256 prompt tokens.

oneDNN needs bf16 weights in a blocked order, and reorders others on every call. With weights that are packed once, a
product of 1 to 16 rows takes about half the time: on one core, a SmolLM2-135M step at batch 1 was measured to take
7.5 ms instead of 14.1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve_kernels import reference
from pdserve_kernels.contract import (
    AttentionRow,
    BlockWeight,
    ExpertsForm,
    ExpertWeights,
    HeadLinear,
    HeadNorms,
    Linear,
    SparseForm,
    UnreadWeight,
    check_window,
    widest_window,
)
from pdserve_kernels.cpu.sparse_attention import GatheredAttention, choose_plainly
from pdserve_kernels.kv_layout import KvLayout

MakeLinear = Callable[[UnreadWeight | BlockWeight, torch.Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class _Expert:
    inner: Sequence[Linear]
    """One product, or those of gates and of ups."""
    down: Linear


class LoopedExperts:
    """Satisfies ``contract.Experts``. Only the experts that a step's rows are sent to are computed."""

    def __init__(self, form: ExpertsForm, weights: Iterable[ExpertWeights], linear: MakeLinear) -> None:
        form.routing.check(form.count)
        self._form = form
        self._experts = [_expert(each, linear) for each in weights]

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        form = self._form
        weights, experts = reference.route(logits, form.routing, form.correction, form.factors)
        beside = reference.with_identities(form, x, weights, experts, beside)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        tokens, weights = order // form.routing.chosen, weights.to(x.dtype).flatten()[order].unsqueeze(1)
        out = torch.zeros_like(x) if beside is None else beside.clone()
        counts: list[int] = chosen.bincount(minlength=form.count).tolist()
        first = sum(counts[: form.own.start])
        for expert, count in zip(self._experts, counts[form.own.start : form.own.stop], strict=True):
            if count:
                group = slice(first, first + count)
                mine = tokens[group]
                given = x[mine] * weights[group] if form.weighs_inputs else x[mine]
                inner = torch.cat([linear(given) for linear in expert.inner], 1)
                result = expert.down(reference.activated(inner, form.activation, gated=form.gated))
                if not form.weighs_inputs:
                    result = result * weights[group]
                # An expert has a token once. For a few rows, ``index_add_`` takes longer than the products.
                out[mine] += result
                first += count
        return out


def _expert(weights: ExpertWeights, linear: MakeLinear) -> _Expert:
    parts: list[torch.Tensor | None] = [None] * len(weights.inner)
    if weights.inner_bias is not None:
        parts = [*weights.inner_bias.chunk(len(weights.inner))]
    inner = [linear(weight, bias) for weight, bias in zip(weights.inner, parts, strict=True)]
    return _Expert(inner, linear(weights.down, weights.down_bias))


class KvWrite:
    """Stores one step's tokens. Their places are computed once and used by every layer.

    ``slots`` is ``[tokens]`` of ``block * block_size + offset``.
    """

    def __init__(self, layout: KvLayout, cache: torch.Tensor, slots: torch.Tensor) -> None:
        self._layout = layout
        blocks = slots // layout.block_size
        key_tiles = layout.tile_rows(blocks).T
        tiles = torch.stack([key_tiles + tile for tile in range(layout.tiles_a_layer)])
        offsets = (slots % layout.block_size).view(1, -1, 1)
        if layout.fp8:
            self._numbers, self._exponents = layout.split(layout.tiles(cache))
            self._at = tiles.reshape(-1), offsets.expand(tiles.shape).reshape(-1)
            return
        self._rows = layout.tokens(cache)
        self._index = (tiles * layout.block_size + offsets).reshape(-1)

    def __call__(self, layer: int, key_value: torch.Tensor) -> None:
        """Stores ``key_value``, ``[2, tokens, kv_heads, head_dim]``, or ``[1, ...]`` without values."""
        if self._layout.fp8:
            tiles, offsets = self._at
            tiles = tiles + self._layout.tiles_a_layer * layer
            numbers, exponents = reference.quantised(key_value.reshape(-1, self._layout.head_dim))
            self._numbers[tiles, offsets], self._exponents[tiles, offsets] = numbers, exponents
            return
        first = self._layout.tiles_a_layer * layer * self._layout.block_size
        self._rows[first:].index_copy_(0, self._index, key_value.reshape(-1, self._layout.head_dim))


class DecodeAttention:
    """Attention of one new token for each of several requests. It is planned once a step and called once a layer."""

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        cap: float | None = None,
        room: torch.Tensor | None = None,
    ) -> None:
        """Plans a step of single-token ``rows``.

        The context is gathered in ``room``, of at least ``gathered_size`` elements, or in memory of its own.
        """
        self._layout = layout
        self._tiles = layout.tiles(cache)
        self._requests = len(rows)
        self._group = heads // layout.kv_heads
        blocks = max(_blocks_of(row, layout.block_size) for row in rows)
        table = torch.zeros(self._requests, blocks, dtype=torch.int64)
        for places, row in zip(table, rows, strict=True):
            used = _blocks_of(row, layout.block_size)
            places[:used] = torch.tensor(row.blocks[:used])
            # A row is padded with a block of its own: masked values are multiplied, and NaN of others would spread.
            places[used:] = row.blocks[0]
        keys = layout.tile_rows(table).transpose(0, 1)
        self._index = _tiles_of_all(layout, keys).to(cache.device)
        self._context = blocks * layout.block_size
        size = gathered_size(layout, rows)
        room = cache.new_empty(size) if room is None else room[:size]
        self._gathered = room.view(len(self._index), layout.tile_elements)
        self._scale, self._cap = scale, cap
        self._lengths = torch.tensor([row.context_len for row in rows]).unsqueeze(1)
        self._first = torch.tensor([row.first_block * layout.block_size for row in rows]).unsqueeze(1)
        self._masks: dict[tuple[int | None, bool], torch.Tensor] = {}

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps ``query``, ``[requests, heads, head_dim]``, to ``[requests, heads, value_dim]``."""
        layout = self._layout
        torch.index_select(self._tiles[layout.tiles_a_layer * layer :], 0, self._index, out=self._gathered)
        stored = numbers(layout, self._gathered).view(layout.tiles_a_layer, -1, self._context, layout.head_dim)
        keys, values = stored[0], stored[-1, ..., : layout.value_dim]
        rows = query.reshape(-1, self._group, layout.head_dim)
        by_row = None if sinks is None else sinks.view(-1, self._group, 1).repeat(self._requests, 1, 1)
        mask = self._mask(window, chunked=chunked)
        return _attend(rows, keys, values, mask, self._scale, self._cap, by_row).view(*query.shape[:2], -1)

    def _mask(self, window: int | None, *, chunked: bool) -> torch.Tensor:
        """Returns what is added to the scores, ``[requests * kv_heads, group, context]``."""
        if (window, chunked) not in self._masks:
            key_at = torch.arange(self._context) + self._first
            hidden = key_at >= self._lengths
            if window is not None:
                hidden |= key_at < reference.first_seen(self._lengths - 1, window, chunked=chunked)
            mask = _minus_infinity_where(hidden, self._layout.dtype, self._gathered.device)
            mask = mask.repeat_interleave(self._layout.kv_heads, 0).unsqueeze(1).expand(-1, self._group, -1)
            self._masks[window, chunked] = mask
        return self._masks[window, chunked]


def gathered_size(layout: KvLayout, rows: Sequence[AttentionRow]) -> int:
    """Returns how many elements a ``DecodeAttention`` of these rows gathers: each has as many blocks as the longest."""
    context = max(_blocks_of(row, layout.block_size) for row in rows) * layout.block_size
    return layout.tiles_a_layer * layout.kv_heads * len(rows) * context // layout.block_size * layout.tile_elements


def _tiles_of_all(layout: KvLayout, keys: torch.Tensor) -> torch.Tensor:
    """Returns the rows of layer 0's tiles, those of keys first, for the rows of its key tiles."""
    return torch.stack([keys + tile for tile in range(layout.tiles_a_layer)]).reshape(-1)


def numbers(layout: KvLayout, tiles: torch.Tensor) -> torch.Tensor:
    """Returns tiles ``[..., tile_elements]`` as numbers of the model's dtype."""
    return reference.dequantised(*layout.split(tiles), layout.dtype) if layout.fp8 else tiles


def _blocks_of(row: AttentionRow, block_size: int) -> int:
    """Returns how many blocks a row reads."""
    return -(-row.context_len // block_size) - row.first_block


class PrefillAttention:
    """Attention of several new tokens of one request. It is planned once a step and called once a layer."""

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        span: AttentionRow,
        heads: int,
        scale: float,
        cap: float | None = None,
    ) -> None:
        self._layout = layout
        self._tiles = layout.tiles(cache)
        self._group = heads // layout.kv_heads
        self._first = span.first_block * layout.block_size
        self._context = span.context_len - self._first
        blocks = torch.tensor(span.blocks[: _blocks_of(span, layout.block_size)])
        self._index = _tiles_of_all(layout, layout.tile_rows(blocks)).to(cache.device)
        self._gathered = cache.new_empty(len(self._index), layout.tile_elements)
        self._scale, self._cap = scale, cap
        self._query_at = torch.arange(span.context_len - span.new_tokens, span.context_len).unsqueeze(1)
        self._masks: dict[tuple[int | None, bool], torch.Tensor] = {}

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps ``query``, ``[new_tokens, heads, head_dim]``, to ``[new_tokens, heads, value_dim]``."""
        layout = self._layout
        torch.index_select(self._tiles[layout.tiles_a_layer * layer :], 0, self._index, out=self._gathered)
        context = numbers(layout, self._gathered).view(layout.tiles_a_layer, layout.kv_heads, -1, layout.head_dim)
        keys, values = context[0, :, : self._context], context[-1, :, : self._context, : layout.value_dim]
        new = query.shape[0]
        by_head = query.view(new, layout.kv_heads, self._group, layout.head_dim).permute(1, 2, 0, 3)
        rows = by_head.reshape(layout.kv_heads, self._group * new, layout.head_dim)
        mask = self._mask(window, chunked=chunked).expand(layout.kv_heads, -1, -1)
        by_row = None if sinks is None else sinks.view(-1, self._group, 1).repeat_interleave(new, 1)
        out = _attend(rows, keys, values, mask, self._scale, self._cap, by_row)
        heads_first = out.view(layout.kv_heads * self._group, new, layout.value_dim)
        return heads_first.transpose(0, 1)

    def _mask(self, window: int | None, *, chunked: bool) -> torch.Tensor:
        """Returns what is added to the scores, ``[group * new_tokens, context]``."""
        if (window, chunked) not in self._masks:
            key_at = torch.arange(self._context) + self._first
            hidden = key_at > self._query_at
            if window is not None:
                hidden |= key_at < reference.first_seen(self._query_at, window, chunked=chunked)
            mask = _minus_infinity_where(hidden, self._layout.dtype, self._gathered.device)
            self._masks[window, chunked] = mask.repeat(self._group, 1)
        return self._masks[window, chunked]


def _minus_infinity_where(hidden: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).to(device)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends with ``query``, ``[batch, rows, head_dim]``. ``sinks`` is ``[batch, rows, 1]``."""
    if cap is None:
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(query, keys.transpose(1, 2)).float().mul_(scale / cap).tanh_().mul_(cap).add_(mask)
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = torch.softmax(torch.cat((scores.float(), sinks), -1), -1)[..., :-1]
    return torch.bmm(weights.to(values.dtype), values)


SMALLEST_BUCKET = 4
"""Contexts of up to ``2 ** SMALLEST_BUCKET`` blocks are attended to together."""

GATHERED_TOKENS = 2**17
"""Rows are attended to together while their contexts have at most so many tokens, padding included. A replay may have
hundreds of rows with long contexts, and copies of all those contexts at once would not fit into memory."""


class TorchAttention:
    """Attention of a step whose single-token rows come first. It is planned once a step and called once a layer."""

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        cap: float | None,
    ) -> None:
        singles = [row for row in rows if row.new_tokens == 1]
        spans = rows[len(singles) :]
        if any(row.new_tokens == 1 for row in spans):
            raise ValueError("rows with one token must come before rows with several")
        self._kv_heads, self._value_dim = layout.kv_heads, layout.value_dim
        self._widest = widest_window(rows, layout.block_size)
        self._write = KvWrite(layout, cache, _slots(rows, layout.block_size).to(cache.device))
        self._parts: list[tuple[slice | torch.Tensor, DecodeAttention | PrefillAttention]] = []
        groups = _by_context(singles, layout.block_size)
        together = [[singles[i] for i in members] for members in groups]
        # The parts are computed one after another, so they take turns with one copy of a context.
        room = cache.new_empty(max((gathered_size(layout, some) for some in together), default=0))
        for members, some in zip(groups, together, strict=True):
            decode = DecodeAttention(layout, cache, some, heads, scale, cap, room)
            self._parts.append((torch.tensor(members), decode))
        first = len(singles)
        for row in spans:
            attend = PrefillAttention(layout, cache, row, heads, scale, cap)
            self._parts.append((slice(first, first + row.new_tokens), attend))
            first += row.new_tokens

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
        check_window(window, self._widest)
        if key_value is not None:
            self._write(layer, key_value)
        if len(self._parts) == 1:
            return self._parts[0][1](layer, query, window, chunked=chunked, sinks=sinks)
        out = query.new_empty(*query.shape[:2], self._value_dim)
        for where, attend in self._parts:
            out[where] = attend(layer, query[where], window, chunked=chunked, sinks=sinks)
        return out

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
        query, key_value = reference.projected(qkv, self._kv_heads, cos, sin, norms)
        return self(layer, query, key_value, window, chunked=chunked, sinks=sinks)


def _by_context(singles: Sequence[AttentionRow], block_size: int) -> list[list[int]]:
    """Divides rows into groups of similar context length, each of at most ``GATHERED_TOKENS``.

    A group is padded to its longest context, so with one group for all, one long request would slow all others down: a
    step of 31 requests of 200 tokens and one of 8,000 was measured to take 1,563 ms, and about 70 ms in groups.
    """
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(singles):
        blocks = _blocks_of(row, block_size)
        groups.setdefault(max(SMALLEST_BUCKET, (blocks - 1).bit_length()), []).append(i)
    together = []
    for bucket, members in groups.items():
        most = max(1, GATHERED_TOKENS // (2**bucket * block_size))
        together += [members[first : first + most] for first in range(0, len(members), most)]
    return together


def _slots(rows: Sequence[AttentionRow], block_size: int) -> torch.Tensor:
    slots: list[int] = []
    for row in rows:
        table = row.blocks
        slots.extend(
            table[position // block_size - row.first_block] * block_size + position % block_size
            for position in range(row.context_len - row.new_tokens, row.context_len)
        )
    return torch.tensor(slots, dtype=torch.int64)


PACKED_FOR_ROWS = 16
"""The packed order is chosen for this number of rows. More rows were not slower with it than with their own order."""


class PackedLinear:
    """Computes ``x @ weight.T + bias``, with ``weight``, ``[out, in]``, packed if that is faster."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _packs(weight)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        return F.linear(x, self._weight, self._bias)


def _packs(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no annotation
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class TorchKernels:
    """Satisfies ``contract.Kernels``."""

    name = "torch"
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    rotary = staticmethod(reference.rotary)
    activated = staticmethod(reference.activated)
    causal_conv = staticmethod(reference.causal_conv)
    gated_delta_rule = staticmethod(reference.gated_delta_rule)
    mamba2_scan = staticmethod(reference.mamba2_scan)
    mamba_scan = staticmethod(reference.mamba_scan)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight, bias)

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        return reference.HeadLinear(weight)

    def experts(self, form: ExpertsForm, weights: Iterable[ExpertWeights]) -> LoopedExperts:
        def linear(weight: UnreadWeight | BlockWeight, bias: torch.Tensor | None) -> PackedLinear:
            if isinstance(weight, BlockWeight):
                raise TypeError("the set of plain torch does not multiply from blocks")
            return PackedLinear(weight.read(), bias)

        return LoopedExperts(form, weights, linear)

    def plan_attention(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        cap: float | None = None,
    ) -> TorchAttention:
        return TorchAttention(layout, cache, rows, heads, scale, cap)

    def plan_sparse(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        form: SparseForm,
    ) -> GatheredAttention:
        return GatheredAttention(layout, cache, rows, heads, scale, form, self.plan_attention, choose_plainly)
