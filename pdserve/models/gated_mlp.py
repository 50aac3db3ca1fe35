"""The gated feed-forward part of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdserve.models.layers import Building, RowParallel, column_parallel
from pdserve.models.tensor_parallel import share


class GatedMlp:
    """``down(activation(gate(x)) * up(x))``, with this rank's part of the ``channels`` in between."""

    def __init__(
        self, building: Building, prefix: str, channels: int, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """``activation`` takes gate and up side by side, as the kernels' ``silu_and_mul`` does."""
        mine = share(building.tp, channels, "MLP channels")
        self._gate_up = column_parallel(building, [(f"{prefix}.gate_proj", mine), (f"{prefix}.up_proj", mine)])
        self._down = RowParallel(building, f"{prefix}.down_proj", mine)
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden_size]`` to the same shape."""
        return self._down(self._activation(self._gate_up(x)))
