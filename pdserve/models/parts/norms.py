"""Normalises hidden states: by root mean square, or by mean and variance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from pdserve.models.parts.projections import Building
from pdserve.models.recipe import Norm, NormKind
from pdserve.models.tp.shares import TpGroup
from pdserve_kernels.contract import Kernels, Linear
from pdserve_kernels.feed_forward import Activation


class LoadedNorm(Protocol):
    """Normalises over the last dimension."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the normalised sum, and the sum."""


def load_norm(building: Building, norm: Norm, name: str, width: int) -> LoadedNorm:
    """Takes the tensors of the norm ``name`` over ``width`` channels."""
    checkpoint = building.checkpoint
    if norm.gate_rank:
        down = building.linear(building.weight(f"{name}.W_down.weight", (norm.gate_rank, width)))
        up = building.linear(building.weight(f"{name}.W_up.weight", (width, norm.gate_rank)))
        own = load_norm(building, replace(norm, gate_rank=0), f"{name}.norm", width)
        return GatedNorm(building.kernels, own, down, up)
    weight = None
    if norm.weighted:
        weight = checkpoint.take(f"{name}.weight", (width,))
        if norm.offset:
            weight = weight + norm.offset
    if norm.kind is NormKind.LAYER:
        return LayerNorm(width, weight, checkpoint.take(f"{name}.bias", (width,)) if norm.biased else None, norm.eps)
    if weight is None:
        weight = torch.ones(width, dtype=checkpoint.dtype, device=checkpoint.device)
    return RmsNorm(building.kernels, weight, norm.eps)


class RmsNorm:
    """Satisfies ``LoadedNorm``."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, eps: float) -> None:
        self._kernels, self._weight, self._eps = kernels, weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """Satisfies ``LoadedNorm``: another norm, whose output has a gate that it gives itself."""

    kernels: Kernels
    norm: LoadedNorm
    down: Linear
    up: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(self.norm(x))

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self.norm.of_sum(x, residual)
        return self._gated(normed), total

    def _gated(self, normed: torch.Tensor) -> torch.Tensor:
        inner = self.kernels.activated(self.down(normed), Activation.SILU, gated=False)
        gates = self.kernels.activated(self.up(inner).float(), Activation.SIGMOID, gated=False)
        return (normed * gates).to(normed.dtype)


class StreamNorm:
    """Normalises each of several residuals by itself, with weights of its own. It computes in fp32."""

    def __init__(self, building: Building, norm: Norm, name: str, count: int, hidden_size: int) -> None:
        """Takes the tensor of the norm ``name``, of ``count`` residuals."""
        checkpoint = building.checkpoint
        weight = checkpoint.take(f"{name}.weight", (count * hidden_size,), dtype=torch.float32) + norm.offset
        self._weight = weight.view(count, hidden_size)
        self._ones = torch.ones(hidden_size, dtype=torch.float32, device=checkpoint.device)
        self._kernels, self._eps = building.kernels, norm.eps

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, count, hidden_size]`` to the same shape."""
        normed = self._kernels.rms_norm(streams.float().flatten(0, 1), self._ones, self._eps)
        return (normed.view(streams.shape) * self._weight).to(streams.dtype)


class LayerNorm:
    """Satisfies ``LoadedNorm``."""

    def __init__(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
        self._shape, self._weight, self._bias, self._eps = (width,), weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self(total), total


def norm_of_all(
    tp: TpGroup, kernels: Kernels, x: torch.Tensor, weight: torch.Tensor, width: int, eps: float, copies: int = 1
) -> torch.Tensor:
    """Returns ``x``, ``[tokens, own]``, as RMS over ``width`` numbers gives it, of which ranks have their own.

    ``weight`` is this rank's, ``[own]``. ``copies`` ranks have the same numbers.
    """
    if tp.size == 1:
        return kernels.rms_norm(x, weight, eps)
    squares = tp.all_reduce(x.float().square().sum(-1, keepdim=True) / copies)
    return (x.float() * torch.rsqrt(squares / width + eps)).to(x.dtype) * weight
