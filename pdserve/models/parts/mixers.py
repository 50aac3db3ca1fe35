"""Builds the parts that mix tokens by a state, in place of attention or beside it. The smallest of them is here."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.delta_net import DeltaNet
from pdserve.models.parts.mamba import Mamba, Mamba2
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.recipe import DeltaNetRecipe, Mamba2Recipe, MambaRecipe, MixerRecipe, ShortConvRecipe
from pdserve.models.tp.shares import share
from pdserve_kernels.contract import StateRuns


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


MIXERS: dict[type[MixerRecipe], MixerPart] = {
    DeltaNetRecipe: DeltaNet,
    Mamba2Recipe: Mamba2,
    MambaRecipe: Mamba,
    ShortConvRecipe: ShortConv,
}
"""The part of each kind of recipe."""


def build_mixer(config: FamilyConfig, building: Building, recipe: MixerRecipe, prefix: str, index: int) -> Mixer:
    return MIXERS[type(recipe)](config, building, recipe, prefix, index)
