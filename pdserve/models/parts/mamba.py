"""Mixes tokens by a Mamba: a short convolution, and a state that each token updates.

The state of ``Mamba``, the first one (Gu and Dao, 2023), is numbers of each channel. That of ``Mamba2`` (Dao and Gu,
2024) is a matrix of each head.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.feed_forward import gated
from pdserve.models.parts.norms import LoadedNorm, load_norm
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.recipe import Mamba2Recipe, MambaRecipe, Norm
from pdserve.models.tp.shares import TpGroup, share, spread
from pdserve_kernels.contract import StateRuns
from pdserve_kernels.feed_forward import Activation


class Mamba2:
    """Satisfies ``Mixer``, with this rank's parts of the groups of heads."""

    def __init__(self, config: FamilyConfig, building: Building, recipe: Mamba2Recipe, prefix: str, index: int) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        checkpoint, hidden, self._kernels = building.checkpoint, config.hidden_size, building.kernels
        mine = share(building.tp, recipe.heads, "parts of a Mamba")
        parts = range(mine.start, mine.stop)
        groups = range(mine.start // recipe.parts, (mine.stop - 1) // recipe.parts + 1)
        self._recipe, self._parts, self._groups = recipe, len(parts), len(groups)
        heads = slice(mine.start * recipe.group, mine.stop * recipe.group)
        values = spread(heads, recipe.head_dim)
        all_heads, all_values = recipe.heads * recipe.group, recipe.heads * recipe.group * recipe.head_dim
        convolved = [*chain.from_iterable(_channels(recipe, part) for part in parts)]
        all_channels = recipe.all_conv_channels
        self._group_of: torch.Tensor | None = None
        """The group of each part, counted from this rank's first, if parts share them."""
        channels = convolved
        if len(groups) < len(parts):
            # What all parts of a group have in common is computed once.
            channels = [*range(values.start, values.stop)]
            channels += chain.from_iterable(_shared_channels(recipe, group) for group in groups)
            of_parts = [part // recipe.parts - groups.start for part in parts]
            self._group_of = torch.tensor(of_parts, device=checkpoint.device)
        # A checkpoint has all gates, then what is convolved, then all steps.
        rows = [
            *range(values.start, values.stop),
            *(all_values + channel for channel in channels),
            *range(all_values + all_channels + heads.start, all_values + all_channels + heads.stop),
        ]
        outputs = all_values + all_channels + all_heads
        inner = Projection(prefix + recipe.inner, outputs, tuple(rows), recipe.biased)
        self._inner = column_parallel(building, hidden, [inner])
        self._sizes = [values.stop - values.start, len(channels), heads.stop - heads.start]
        shape = (all_channels, 1, recipe.width)
        weight = checkpoint.take(f"{prefix}{recipe.conv}.weight", shape, rows=tuple(convolved))
        self._conv = weight.view(len(parts), -1, recipe.width).permute(2, 0, 1).contiguous()
        self._conv_bias: torch.Tensor | None = None
        if recipe.conv_biased:
            bias = checkpoint.take(f"{prefix}{recipe.conv}.bias", (all_channels,), rows=tuple(convolved))
            self._conv_bias = bias.view(len(parts), -1)
        self._scales: torch.Tensor | None = None
        if recipe.scales is not None:
            scales = _scales(recipe, recipe.scales)
            self._scales = torch.tensor([scales[row] for row in rows], dtype=weight.dtype, device=weight.device)

        def of_heads(name: str) -> torch.Tensor:
            taken = checkpoint.take(prefix + name, (all_heads,), rows=heads, dtype=torch.float32)
            return taken.view(len(parts), -1)

        self._step_bias, self._rate = of_heads(recipe.step_bias), -of_heads(recipe.log_rate).exp()
        self._skip = of_heads(recipe.skip)
        self._norm: _GroupNorm | None = None
        if recipe.norm is not None:
            weight = checkpoint.take(f"{prefix}{recipe.gated_norm}.weight", (all_values,), rows=values)
            self._norm = _GroupNorm(building.tp, recipe, recipe.norm, mine, weight)
        out = (hidden, all_values)
        self._out = RowParallel(building, prefix + recipe.out, out, values, biased=recipe.out_biased)

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        recipe, tokens, parts = self._recipe, x.shape[0], self._parts
        projected = self._inner(x) if self._scales is None else self._inner(x) * self._scales
        gate, inner, steps = torch.split(projected, self._sizes, -1)
        before = (recipe.width - 1) * recipe.conv_channels
        convolved = self._kernels.causal_conv(
            self._by_part(inner),
            self._conv,
            self._conv_bias,
            state[..., :before].view(-1, parts, recipe.width - 1, recipe.conv_channels),
            runs,
            silu=True,
        )
        lengths = steps.float().view(tokens, parts, recipe.group) + self._step_bias
        lengths = self._kernels.activated(lengths, Activation.SOFTPLUS, gated=False)
        matrices = state[..., before:].view(-1, parts, recipe.group, recipe.head_dim, recipe.size)
        found = self._kernels.mamba2_scan(convolved, lengths, self._rate, self._skip, matrices, runs)
        return self._out(self._gated(found.view(tokens, -1).float(), gate.float()).to(x.dtype))

    def _by_part(self, inner: torch.Tensor) -> torch.Tensor:
        """Maps this rank's outputs ``[tokens, channels]`` to ``[tokens, parts, conv_channels]``."""
        recipe, tokens = self._recipe, inner.shape[0]
        if self._group_of is None:
            return inner.reshape(tokens, self._parts, recipe.conv_channels)
        shared = 2 * self._groups * recipe.size
        own, shared_by = torch.split(inner, [inner.shape[1] - shared, shared], -1)
        of_groups = shared_by.reshape(tokens, self._groups, 2 * recipe.size)
        return torch.cat((own.reshape(tokens, self._parts, -1), of_groups.index_select(1, self._group_of)), -1)

    def _gated(self, found: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Maps fp32 outputs and gates ``[tokens, values]`` to the input of the last product."""
        if self._norm is None:
            return gated(self._kernels, gate, found, Activation.SILU)
        if self._recipe.gate_after_norm:
            return gated(self._kernels, gate, self._norm(found).float(), Activation.SILU)
        return self._norm(gated(self._kernels, gate, found, Activation.SILU))


class _GroupNorm:
    """The norm of each group of heads, of which this rank may have some parts only."""

    def __init__(self, tp: TpGroup, recipe: Mamba2Recipe, norm: Norm, mine: slice, weight: torch.Tensor) -> None:
        """``mine`` are the parts, and ``weight`` the weights, of this rank."""
        self._tp, self._eps, self._weight = tp, norm.eps, weight
        self._parts = mine.stop - mine.start
        self._width = recipe.parts * recipe.group * recipe.head_dim
        self._group_of: torch.Tensor | None = None
        """The group of each part, if ranks have parts of the same group."""
        if self._parts % recipe.parts:
            of_parts = [part // recipe.parts for part in range(mine.start, mine.stop)]
            self._group_of = torch.tensor(of_parts, device=weight.device)
            groups = torch.arange(recipe.groups, device=weight.device)
            self._members = (self._group_of.unsqueeze(1) == groups).float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps fp32 ``[tokens, values]`` to the same shape, in the numbers of the model."""
        if self._group_of is None:
            normed = F.rms_norm(x.view(len(x), -1, self._width), (self._width,), None, self._eps)
        else:
            by_part = x.view(len(x), self._parts, -1)
            # Sums of the same parts have the same bits in every step, which they need not have by ``index_add_``.
            squares = (by_part.square().sum(-1, keepdim=True) * self._members).sum(1)
            factors = torch.rsqrt(self._tp.all_reduce(squares) / self._width + self._eps)
            normed = by_part * factors.index_select(1, self._group_of).unsqueeze(-1)
        return normed.view(len(x), -1).to(self._weight.dtype) * self._weight


def _channels(recipe: Mamba2Recipe, part: int) -> list[int]:
    """Returns the places of a part's inputs, and of what they are written and read with.

    All inputs stand first, then what all groups are written with.
    """
    values = recipe.group * recipe.head_dim
    return [*range(part * values, (part + 1) * values), *_shared_channels(recipe, part // recipe.parts)]


def _shared_channels(recipe: Mamba2Recipe, group: int) -> list[int]:
    """Returns the places of what a group is written and read with."""
    size = recipe.size
    write = recipe.heads * recipe.group * recipe.head_dim + group * size
    read = write + recipe.groups * size
    return [*range(write, write + size), *range(read, read + size)]


def _scales(recipe: Mamba2Recipe, scales: tuple[float, ...]) -> list[float]:
    """Returns the factor of each output of the first product, in the order of the checkpoint."""
    heads, of_groups = recipe.heads * recipe.group, recipe.groups * recipe.size
    values = heads * recipe.head_dim
    counts = (values, values, of_groups, of_groups, heads)
    return [*chain.from_iterable([scale] * count for scale, count in zip(scales, counts, strict=True))]


class Mamba:
    """Satisfies ``Mixer``, with this rank's channels."""

    def __init__(self, config: FamilyConfig, building: Building, recipe: MambaRecipe, prefix: str, index: int) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        checkpoint, hidden, self._kernels = building.checkpoint, config.hidden_size, building.kernels
        parts = share(building.tp, recipe.heads, "parts of a Mamba")
        self._recipe, self._parts = recipe, parts.stop - parts.start
        mine, channels, size = spread(parts, recipe.channels), recipe.heads * recipe.channels, recipe.size
        # A checkpoint has all inputs, and then all gates.
        rows = (*range(mine.start, mine.stop), *range(channels + mine.start, channels + mine.stop))
        inner = Projection(prefix + recipe.inner, 2 * channels, rows, recipe.biased)
        self._inner = column_parallel(building, hidden, [inner])
        weight = checkpoint.take(f"{prefix}{recipe.conv}.weight", (channels, 1, recipe.width), rows=mine)
        self._conv = weight.view(self._parts, -1, recipe.width).permute(2, 0, 1).contiguous()
        self._conv_bias: torch.Tensor | None = None
        if recipe.conv_biased:
            bias = checkpoint.take(f"{prefix}{recipe.conv}.bias", (channels,), rows=mine)
            self._conv_bias = bias.view(self._parts, -1)
        self._sizes = [recipe.rank, size, size]
        selected = (sum(self._sizes), channels)
        self._select = RowParallel(building, prefix + recipe.selecting, selected, mine, biased=False)
        self._norms: list[LoadedNorm] = []
        if recipe.norm is not None:
            named = zip(recipe.norms, self._sizes, strict=True)
            self._norms = [load_norm(building, recipe.norm, prefix + name, count) for name, count in named]
        steps = Projection(prefix + recipe.steps, channels, mine)
        self._steps = column_parallel(building, recipe.rank, [steps])
        of_channels = (self._parts, recipe.channels)
        name, fp32 = f"{prefix}{recipe.steps}.bias", torch.float32
        self._step_bias = checkpoint.take(name, (channels,), rows=mine, dtype=fp32)
        rate = checkpoint.take(prefix + recipe.log_rate, (channels, size), rows=mine, dtype=fp32)
        self._rate = -rate.exp().view(*of_channels, size)
        self._skip = checkpoint.take(prefix + recipe.skip, (channels,), rows=mine, dtype=fp32).view(of_channels)
        self._out = RowParallel(building, prefix + recipe.out, (hidden, channels), mine, biased=recipe.biased)

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        recipe, tokens, parts = self._recipe, x.shape[0], self._parts
        inner, gate = self._inner(x).chunk(2, -1)
        before = (recipe.width - 1) * recipe.channels
        convolved = self._kernels.causal_conv(
            inner.reshape(tokens, parts, recipe.channels),
            self._conv,
            self._conv_bias,
            state[..., :before].view(-1, parts, recipe.width - 1, recipe.channels),
            runs,
            silu=True,
        )
        selected = torch.split(self._select(convolved.view(tokens, -1)), self._sizes, -1)
        if self._norms:
            selected = tuple(norm(each.contiguous()) for norm, each in zip(self._norms, selected, strict=True))
        lengths, write, read = selected
        steps = self._kernels.activated(
            self._steps(lengths).float() + self._step_bias, Activation.SOFTPLUS, gated=False
        )
        steps = steps.view(tokens, parts, recipe.channels)
        numbers = state[..., before:].view(-1, parts, recipe.channels, recipe.size)
        found = self._kernels.mamba_scan(
            convolved, steps, write.float(), read.float(), self._rate, self._skip, numbers, runs
        )
        chosen = gated(self._kernels, gate.float(), found.view(tokens, -1).float(), Activation.SILU)
        return self._out(chosen.to(x.dtype))
