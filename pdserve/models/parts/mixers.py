"""Builds the parts that mix tokens by a state, in place of attention or beside it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.delta_net import DeltaNet
from pdserve.models.parts.mamba import Mamba2
from pdserve.models.parts.mamba1 import Mamba
from pdserve.models.parts.projections import Building
from pdserve.models.parts.short_conv import ShortConv
from pdserve.models.recipe import DeltaNetRecipe, Mamba2Recipe, MambaRecipe, MixerRecipe, ShortConvRecipe
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


MIXERS: dict[type[MixerRecipe], MixerPart] = {
    DeltaNetRecipe: DeltaNet,
    Mamba2Recipe: Mamba2,
    MambaRecipe: Mamba,
    ShortConvRecipe: ShortConv,
}
"""The part of each kind of recipe."""


def build_mixer(config: FamilyConfig, building: Building, recipe: MixerRecipe, prefix: str, index: int) -> Mixer:
    return MIXERS[type(recipe)](config, building, recipe, prefix, index)
