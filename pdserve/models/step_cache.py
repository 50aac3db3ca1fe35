"""What the layers of one step read and write beside its tokens: keys and values, and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdserve.models.latent_plan import LatentStep
from pdserve_kernels.contract import Attention, StateRuns


@dataclass(frozen=True, slots=True)
class StepStates:
    """One group's states in one step."""

    layers: Sequence[torch.Tensor]
    """The states of each layer of the group, fp32 ``[num_blocks, heads, numbers]``."""
    runs: StateRuns


@dataclass(frozen=True, slots=True)
class StepCache:
    """The cache as one step uses it."""

    attention: Sequence[Attention]
    """The attention of each group of keys and values that has layers, in the order of the groups."""
    states: Sequence[StepStates] = ()
    """Each group of states, in the order of the groups."""
    latents: Sequence[LatentStep] = ()
    """Latent attention of each group, in place of ``attention``, for a model that has it."""
