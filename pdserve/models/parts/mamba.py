"""Mixes tokens by Mamba 2 (Dao and Gu, 2024): a short convolution, and a matrix that each token updates."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.recipe import Mamba2Recipe
from pdserve.models.tp.shares import share, spread
from pdserve_kernels.contract import StateRuns


class Mamba2:
    """Satisfies ``Mixer``, with this rank's groups of heads."""

    def __init__(self, config: FamilyConfig, building: Building, recipe: Mamba2Recipe, prefix: str, index: int) -> None:
        """Takes the layer's tensors, whose names begin with ``prefix``."""
        checkpoint, hidden, self._kernels = building.checkpoint, config.hidden_size, building.kernels
        mine = share(building.tp, recipe.heads, "groups of a Mamba")
        groups = range(mine.start, mine.stop)
        self._recipe, self._groups = recipe, len(groups)
        heads = slice(mine.start * recipe.group, mine.stop * recipe.group)
        values = spread(heads, recipe.head_dim)
        all_heads, all_values = recipe.heads * recipe.group, recipe.heads * recipe.group * recipe.head_dim
        channels = [*chain.from_iterable(_channels(recipe, group) for group in groups)]
        all_channels = recipe.heads * recipe.conv_channels
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
        weight = checkpoint.take(f"{prefix}{recipe.conv}.weight", shape, rows=tuple(channels))
        self._conv = weight.view(len(groups), -1, recipe.width).permute(2, 0, 1).contiguous()
        self._conv_bias: torch.Tensor | None = None
        if recipe.conv_biased:
            bias = checkpoint.take(f"{prefix}{recipe.conv}.bias", (all_channels,), rows=tuple(channels))
            self._conv_bias = bias.view(len(groups), -1)

        def of_heads(name: str) -> torch.Tensor:
            taken = checkpoint.take(prefix + name, (all_heads,), rows=heads, dtype=torch.float32)
            return taken.view(len(groups), -1)

        self._step_bias, self._rate = of_heads(recipe.step_bias), -of_heads(recipe.log_rate).exp()
        self._skip = of_heads(recipe.skip)
        self._norm = checkpoint.take(f"{prefix}{recipe.gated_norm}.weight", (all_values,), rows=values)
        out = (hidden, all_values)
        self._out = RowParallel(building, prefix + recipe.out, out, values, biased=recipe.biased)

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        recipe, tokens, groups = self._recipe, x.shape[0], self._groups
        gate, inner, steps = torch.split(self._inner(x), self._sizes, -1)
        before = (recipe.width - 1) * recipe.conv_channels
        convolved = self._kernels.causal_conv(
            inner.reshape(tokens, groups, recipe.conv_channels),
            self._conv,
            self._conv_bias,
            state[..., :before].view(-1, groups, recipe.width - 1, recipe.conv_channels),
            runs,
            silu=True,
        )
        lengths = F.softplus(steps.float().view(tokens, groups, recipe.group) + self._step_bias)
        matrices = state[..., before:].view(-1, groups, recipe.group, recipe.head_dim, recipe.size)
        found = self._kernels.mamba2_scan(convolved, lengths, self._rate, self._skip, matrices, runs)
        gated = found.view(tokens, -1).float() * F.silu(gate.float())
        by_group = F.rms_norm(gated.view(tokens, groups, -1), (gated.shape[1] // groups,), None, recipe.norm.eps)
        return self._out(by_group.view(tokens, -1).to(x.dtype) * self._norm)


def _channels(recipe: Mamba2Recipe, group: int) -> list[int]:
    """Returns the places of a group's inputs, and of what they are written and read with.

    All groups' inputs stand first, then what all are written with.
    """
    of_heads, groups, size = recipe.group * recipe.head_dim, recipe.heads, recipe.size
    write, read = groups * of_heads + group * size, groups * (of_heads + size) + group * size
    return [*range(group * of_heads, (group + 1) * of_heads), *range(write, write + size), *range(read, read + size)]
