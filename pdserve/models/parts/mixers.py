"""Builds the parts that mix tokens by a state, in place of attention or beside it. Mamba's are in ``mamba``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.weights import ALL, Columns, Rows, joined_columns
from pdserve.models.parts.feed_forward import gated
from pdserve.models.parts.mamba import Mamba, Mamba2
from pdserve.models.parts.norms import norm_of_all
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.recipe import (
    DeltaNetRecipe,
    KimiDeltaRecipe,
    LightningRecipe,
    Mamba2Recipe,
    MambaRecipe,
    MixerRecipe,
    ShortConvRecipe,
)
from pdserve.models.tp.shares import share, spread
from pdserve_kernels.contract import Kernels, StateRuns
from pdserve_kernels.feed_forward import Activation


class Mixer(Protocol):
    """A layer's part with a state, with this rank's heads."""

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape, and writes each run's next state.

        ``state`` is fp32 ``[num_blocks, heads, numbers]``, a strided view: one rank's heads of the states of this
        layer, whose last dimension is dense.
        """


class MixerPart(Protocol):
    def __call__(self, config: FamilyConfig, building: Building, recipe: Any, prefix: str, index: int) -> Mixer:
        """Takes the tensors of layer ``index``, whose names begin with ``prefix``. Raises ModelError."""


class ShortConv:
    """The gated short convolution of LFM2 (Liquid AI, 2025). Satisfies ``Mixer``, with this rank's channels."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: ShortConvRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        checkpoint, hidden, self._kernels = building.checkpoint, config.hidden_size, building.kernels
        heads = share(building.tp, recipe.heads, "parts of a short convolution")
        self._recipe, self._heads = recipe, heads.stop - heads.start
        mine = slice(heads.start * recipe.channels, heads.stop * recipe.channels)
        rows = tuple(part * hidden + channel for part in range(3) for channel in range(mine.start, mine.stop))
        inner = Projection(prefix + recipe.inner, 3 * hidden, rows, recipe.biased)
        self._inner = column_parallel(building, hidden, [inner])
        weight = checkpoint.take(f"{prefix}{recipe.conv}.weight", (hidden, 1, recipe.width), rows=mine)
        self._conv = weight.view(self._heads, recipe.channels, recipe.width).permute(2, 0, 1).contiguous()
        self._bias: torch.Tensor | None = None
        if recipe.biased:
            self._bias = checkpoint.take(f"{prefix}{recipe.conv}.bias", (hidden,), rows=mine).view(self._heads, -1)
        self._out = RowParallel(building, prefix + recipe.out, (hidden, hidden), mine, biased=recipe.biased)

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        recipe, tokens = self._recipe, x.shape[0]
        before, behind, inner = self._inner(x).chunk(3, -1)
        shape = (tokens, self._heads, recipe.channels)
        states = state.view(-1, self._heads, recipe.width - 1, recipe.channels)
        gated = (before * inner).view(shape)
        convolved = self._kernels.causal_conv(gated, self._conv, self._bias, states, runs, silu=False)
        return self._out(behind * convolved.view(tokens, -1))


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """What gated delta nets share: a short convolution, a matrix that each token updates, and a norm with a gate."""

    kernels: Kernels
    conv: torch.Tensor
    """``[width, heads, channels]``, of each key head its query, its key and its values."""
    step_bias: torch.Tensor
    """fp32, one number for each step of a token."""
    rates: torch.Tensor
    """fp32, what steps are multiplied by, after their activation."""
    norm: torch.Tensor
    """``[value_dim]``"""
    eps: float
    gate: Activation
    """The activation of gates."""
    least: float | None = None
    """As ``KimiDeltaRecipe.least_decay``."""
    beta_scale: float = 1.0
    """As in ``DeltaNetRecipe``."""

    def __call__(
        self,
        qkv: torch.Tensor,
        gates: torch.Tensor,
        betas: torch.Tensor,
        steps: torch.Tensor,
        state: torch.Tensor,
        runs: StateRuns,
    ) -> torch.Tensor:
        """Returns ``[tokens, heads, group, value_dim]``, and writes each run's next state.

        ``qkv`` is ``[tokens, heads, channels]``. The others are projected: ``gates`` ``[tokens, heads * group *
        value_dim]``, ``betas`` ``[tokens, heads * group]``, and ``steps`` as many, or one for each channel of a key.
        """
        kernels, (tokens, heads, channels), value_dim = self.kernels, qkv.shape, len(self.norm)
        group, seen = betas.shape[1] // heads, len(self.conv) - 1
        key_dim = (channels - group * value_dim) // 2
        before, matrices = state[..., : seen * channels], state[..., seen * channels :]
        convolved = kernels.causal_conv(qkv, self.conv, None, before.view(-1, heads, seen, channels), runs, silu=True)
        decays = self._decays(steps.float() + self.step_bias)
        shape = (tokens, heads, group)
        found = kernels.gated_delta_rule(
            convolved,
            decays.view(shape if steps.shape == betas.shape else (*shape, key_dim)),
            self._betas(betas).reshape(shape),
            matrices.view(-1, heads, group, key_dim, value_dim),
            runs,
        )
        rows = found.reshape(-1, value_dim)
        normed = kernels.rms_norm(rows, self.norm, self.eps)
        by_gate = gated(kernels, gates.reshape(rows.shape).float(), normed.float(), self.gate)
        return by_gate.to(qkv.dtype).view(*shape, value_dim)

    def _betas(self, betas: torch.Tensor) -> torch.Tensor:
        """Maps projected betas to fp32 ones, of the same shape."""
        found = self.kernels.activated(betas, Activation.SIGMOID, gated=False).float()
        return found if self.beta_scale == 1.0 else found * self.beta_scale

    def _decays(self, steps: torch.Tensor) -> torch.Tensor:
        """Maps fp32 steps to the logarithms of decays, of the same shape."""
        if self.least is None:
            return self.rates * self.kernels.activated(steps, Activation.SOFTPLUS, gated=False)
        return self.least * self.kernels.activated(-self.rates * steps, Activation.SIGMOID, gated=False)


class DeltaNet:
    """A gated delta net (Yang et al., 2024). Satisfies ``Mixer``, with this rank's key heads and their value heads."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: DeltaNetRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        checkpoint, hidden = building.checkpoint, config.hidden_size
        self._recipe = recipe
        keys = share(building.tp, recipe.heads, "key heads of a delta net")
        heads = range(keys.start, keys.stop)
        values = slice(keys.start * recipe.group, keys.stop * recipe.group)
        self._heads = len(heads)
        self._inner = column_parallel(building, hidden, _projections(recipe, prefix, heads, values))
        weight = _conv_weight(building, recipe, prefix, heads)
        conv = weight.view(self._heads, -1, recipe.width).permute(2, 0, 1).contiguous()

        def of_heads(name: str) -> torch.Tensor:
            return checkpoint.take(prefix + name, (recipe.value_heads,), rows=values, dtype=torch.float32)

        bias, rates = of_heads(recipe.step_bias), -of_heads(recipe.log_rate).exp()
        norm = checkpoint.take(f"{prefix}{recipe.gated_norm}.weight", (recipe.value_dim,))
        self._rule = DeltaRule(
            building.kernels,
            conv,
            bias,
            rates,
            norm,
            recipe.norm.eps,
            recipe.gate,
            beta_scale=recipe.beta_scale,
        )
        out = (hidden, recipe.value_heads * recipe.value_dim)
        self._out = RowParallel(building, prefix + recipe.out, out, _out_columns(recipe, keys), biased=False)

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        recipe, tokens, heads = self._recipe, x.shape[0], self._heads
        of_conv, of_head = recipe.conv_channels, recipe.group * recipe.value_dim
        sizes = [heads * of_conv, heads * of_head, heads * recipe.group, heads * recipe.group]
        qkv, gates, betas, steps = torch.split(self._inner(x), sizes, -1)
        if len(recipe.inner) == 6:
            keys = heads * recipe.key_dim
            parts = torch.split(qkv, [keys, keys, heads * of_head], -1)
            qkv = torch.cat([part.reshape(tokens, heads, -1) for part in parts], -1)
        by_head = self._rule(qkv.reshape(tokens, heads, of_conv), gates, betas, steps, state, runs)
        return self._out((by_head.transpose(1, 2) if recipe.tiled else by_head).reshape(tokens, -1))


class KimiDelta:
    """A Kimi Delta Attention (Kimi Team, 2025). Satisfies ``Mixer``, with this rank's heads."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: KimiDeltaRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        checkpoint, hidden = building.checkpoint, config.hidden_size
        channels, whole = recipe.channels, recipe.all_channels
        heads = share(building.tp, recipe.heads, "heads of a delta net")
        self._heads, mine = heads.stop - heads.start, spread(heads, channels)
        wide = [Projection(prefix + name, whole, mine) for name in (recipe.query, recipe.key, recipe.value)]
        beta = Projection(prefix + recipe.beta, recipe.heads, heads)
        both = ((recipe.gate_down, recipe.gate_up), (recipe.step_down, recipe.step_up))
        first = [
            Projection(prefix + down, channels, ALL) if down else Projection(prefix + up, whole, mine)
            for down, up in both
        ]
        self._inner = column_parallel(building, hidden, [*wide, *first, beta])
        own = self._heads * channels
        self._sizes = [own, own, own, *(channels if down else own for down, _ in both), self._heads]
        self._gates, self._steps = (
            column_parallel(building, channels, [Projection(prefix + up, whole, mine)]) if down else None
            for down, up in both
        )
        shape = (whole, 1, recipe.width)
        taken = [checkpoint.take(f"{prefix}{name}.weight", shape, rows=mine) for name in recipe.convs]
        conv = torch.cat([each.view(self._heads, channels, recipe.width) for each in taken], 1)
        bias = checkpoint.take(prefix + recipe.step_bias, (whole,), rows=mine, dtype=torch.float32)
        rated = (recipe.heads,) if recipe.flat_rates else (1, 1, recipe.heads, 1)
        log_rates = checkpoint.take(prefix + recipe.log_rate, rated, dtype=torch.float32)
        rates = -log_rates.flatten()[heads].exp().repeat_interleave(channels)
        norm = checkpoint.take(f"{prefix}{recipe.gated_norm}.weight", (channels,))
        self._rule = DeltaRule(
            building.kernels,
            conv.permute(2, 0, 1).contiguous(),
            bias,
            rates,
            norm,
            recipe.norm.eps,
            Activation.SIGMOID,
            recipe.least_decay,
        )
        self._out = RowParallel(building, prefix + recipe.out, (hidden, whole), mine, biased=False)

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        tokens = x.shape[0]
        *wide, gates, steps, betas = torch.split(self._inner(x), self._sizes, -1)
        qkv = torch.cat([each.view(tokens, self._heads, -1) for each in wide], -1)
        gates = gates if self._gates is None else self._gates(gates.contiguous())
        steps = steps if self._steps is None else self._steps(steps.contiguous())
        return self._out(self._rule(qkv, gates, betas, steps, state, runs).view(tokens, -1))


class Lightning:
    """A lightning attention (Qin et al., 2024). Satisfies ``Mixer``, with this rank's heads.

    Its state is that of a Mamba 2 whose steps are all 1: values are written with keys, and read with queries.
    """

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: LightningRecipe, prefix: str, index: int
    ) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        checkpoint, hidden, self._tp = building.checkpoint, config.hidden_size, building.tp
        channels, whole, self._kernels = recipe.channels, recipe.heads * recipe.channels, building.kernels
        heads = share(building.tp, recipe.heads, "heads of a lightning attention")
        self._recipe, self._heads, mine = recipe, heads.stop - heads.start, spread(heads, channels)
        # A head's value, key and query, which stand in another order in the checkpoint.
        parts = ((head * 3 + part) * channels for head in range(heads.start, heads.stop) for part in (2, 1, 0))
        rows = tuple(chain.from_iterable(range(first, first + channels) for first in parts))
        inner = Projection(prefix + recipe.inner, 3 * whole, rows)
        self._inner = column_parallel(building, hidden, [inner, Projection(prefix + recipe.gate, whole, mine)])
        self._norm = checkpoint.take(f"{prefix}{recipe.normed}.weight", (whole,), rows=mine)
        slopes = torch.tensor(recipe.slopes[heads], dtype=torch.float32, device=checkpoint.device)
        self._rate = -slopes.unsqueeze(1)
        self._skip = torch.zeros_like(self._rate)
        self._out = RowParallel(building, prefix + recipe.out, (hidden, whole), mine, biased=False)

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        recipe, tokens, heads, kernels = self._recipe, x.shape[0], self._heads, self._kernels
        own = heads * recipe.channels
        projected, gates = torch.split(self._inner(x), [3 * own, own], -1)
        mixing = kernels.activated(projected.contiguous(), Activation.SILU, gated=False).view(tokens, heads, -1)
        matrices = state.view(-1, heads, 1, recipe.channels, recipe.channels)
        steps = torch.ones((tokens, heads, 1), dtype=torch.float32, device=x.device)
        found = kernels.mamba2_scan(mixing, steps, self._rate, self._skip, matrices, runs).reshape(tokens, own)
        width = recipe.heads * recipe.channels
        normed = norm_of_all(self._tp, kernels, found, self._norm, width, recipe.norm.eps)
        return self._out(gated(kernels, gates, normed, Activation.SIGMOID))


def _projections(recipe: DeltaNetRecipe, prefix: str, heads: range, values: slice) -> list[Projection]:
    """Returns the projections to queries, keys and values by key head, gates, betas and steps, in this order."""
    group, of_values = recipe.group, recipe.group * recipe.value_dim
    if len(recipe.inner) == 2:
        of_head = recipe.conv_channels + of_values
        mixed = [head * of_head + channel for head in heads for channel in range(recipe.conv_channels)]
        gates = [(head + 1) * of_head - of_values + channel for head in heads for channel in range(of_values)]
        betas = [head * 2 * group + number for head in heads for number in range(group)]
        steps = [head * 2 * group + group + number for head in heads for number in range(group)]
        inner, scalars = recipe.inner
        return [
            Projection(prefix + inner, recipe.heads * of_head, tuple(mixed + gates)),
            Projection(prefix + scalars, recipe.heads * 2 * group, tuple(betas + steps)),
        ]
    *mixing, gate, beta, step = recipe.inner if len(recipe.inner) > 1 else recipe.inner * 4
    keys, all_values = recipe.heads * recipe.key_dim, recipe.value_heads * recipe.value_dim
    gated, scalar = spread(values, recipe.value_dim), values
    if len(mixing) == 3:
        own = spread(slice(heads.start, heads.stop), recipe.key_dim)
        each = ((keys, own), (keys, own), (all_values, gated))
        found = [Projection(prefix + name, *size) for name, size in zip(mixing, each, strict=True)]
    else:
        found = [Projection(prefix + mixing[0], 2 * keys + all_values, _all_conv_channels(recipe, heads))]
    found.append(Projection(prefix + gate, all_values, gated))
    found += [Projection(prefix + name, recipe.value_heads, scalar) for name in (beta, step)]
    if len(recipe.inner) > 1:
        return found
    rows, first = list[int](), 0
    for part in found:
        rows += [first + row for row in _listed(part.mine)]
        first += part.outputs
    return [Projection(found[0].name, first, tuple(rows))]


def _listed(rows: Rows) -> Sequence[int]:
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _conv_weight(building: Building, recipe: DeltaNetRecipe, prefix: str, heads: range) -> torch.Tensor:
    """Takes the convolution of these key heads, ``[channels, 1, width]``, by key head."""
    checkpoint, channels = building.checkpoint, _all_conv_channels(recipe, heads)
    shape = (recipe.conv_channels * recipe.heads, 1, recipe.width)
    if not recipe.convs:
        return checkpoint.take(f"{prefix}{recipe.conv}.weight", shape, rows=channels)
    names = [f"{prefix}{name}.weight" for name in recipe.convs]
    sizes = [checkpoint.shape(name) for name in names]
    total = sum(size[0] for size in sizes)
    if total != shape[0]:
        raise ModelError(f"{checkpoint.path}: {', '.join(names)} have {total} channels, not {shape[0]}")
    taken = [checkpoint.take(name, (size[0], *shape[1:])) for name, size in zip(names, sizes, strict=True)]
    return torch.cat(taken)[torch.tensor(channels, device=checkpoint.device)]


def _all_conv_channels(recipe: DeltaNetRecipe, heads: range) -> tuple[int, ...]:
    """Returns the places of these key heads' queries, keys and values, by key head."""
    return tuple(chain.from_iterable(_conv_channels(recipe, head) for head in heads))


def _out_columns(recipe: DeltaNetRecipe, keys: slice) -> Columns:
    """Returns the inputs of ``out`` that the value heads of these key heads give, in the order of the checkpoint."""
    if not recipe.tiled:
        return spread(slice(keys.start * recipe.group, keys.stop * recipe.group), recipe.value_dim)
    starts = range(0, recipe.value_heads, recipe.heads)
    parts = (spread(slice(start + keys.start, start + keys.stop), recipe.value_dim) for start in starts)
    return joined_columns(parts)


def _conv_channels(recipe: DeltaNetRecipe, head: int) -> list[int]:
    """Returns the places of a key head's query, key and values, where all heads' queries stand first, then all keys."""
    keys, of_values = recipe.key_dim, recipe.group * recipe.value_dim
    first, values = recipe.heads * keys, 2 * recipe.heads * keys + head * of_values
    return [
        *range(head * keys, (head + 1) * keys),
        *range(first + head * keys, first + (head + 1) * keys),
        *range(values, values + of_values),
    ]


MIXERS: dict[type[MixerRecipe], MixerPart] = {
    DeltaNetRecipe: DeltaNet,
    KimiDeltaRecipe: KimiDelta,
    LightningRecipe: Lightning,
    Mamba2Recipe: Mamba2,
    MambaRecipe: Mamba,
    ShortConvRecipe: ShortConv,
}
"""The part of each kind of recipe."""


def build_mixer(config: FamilyConfig, building: Building, recipe: MixerRecipe, prefix: str, index: int) -> Mixer:
    return MIXERS[type(recipe)](config, building, recipe, prefix, index)
