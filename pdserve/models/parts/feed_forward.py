"""Computes a layer's feed-forward part, with this rank's part of the channels in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist

import torch
import torch.nn.functional as F

from pdserve.models.checkpoint.weights import Rows
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.recipe import MlpRecipe
from pdserve.models.tp.shares import TpGroup, share
from pdserve_kernels.contract import Kernels
from pdserve_kernels.feed_forward import Activation

FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""Maps ``[tokens, hidden_size]`` to the same shape."""


class Mlp:
    """One feed-forward part that computes every token."""

    def __init__(self, hidden_size: int, building: Building, recipe: MlpRecipe, prefix: str) -> None:
        """Takes the tensors whose names begin with ``prefix``."""
        mine = share(building.tp, recipe.channels, "MLP channels")
        self._inner = column_parallel(building, hidden_size, inner_projections(recipe, prefix, mine))
        shape, biased = (hidden_size, recipe.channels), recipe.down in recipe.biased
        self._down = RowParallel(
            building, prefix + recipe.down, shape, mine, biased=biased, transposed=recipe.transposed
        )
        if recipe.activation is Activation.XIELU:
            self._activate: Callable[[torch.Tensor], torch.Tensor] = _Xielu(building, f"{prefix}mlp.act_fn.")
        else:
            self._activate = activation_of(building.kernels, recipe)
        if recipe.sparsity:
            self._activate = _Sparse(building.tp, recipe, self._activate)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate(self._inner(x)))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the result: the sum of all ranks' is the result."""
        return self._down.part(self._activate(self._inner(x)))


def inner_projections(recipe: MlpRecipe, prefix: str, mine: slice) -> Sequence[Projection]:
    """Returns the projections to a part's channels: gate and up side by side, or up alone."""
    channels = recipe.channels
    if not recipe.fused:
        names = (recipe.gate, recipe.up) if recipe.gate else (recipe.up,)
        return [Projection(prefix + name, channels, mine, name in recipe.biased, recipe.transposed) for name in names]
    rows: Rows = slice(0, 2 * channels)
    if recipe.interleaved:
        rows = (*range(2 * mine.start, 2 * mine.stop, 2), *range(2 * mine.start + 1, 2 * mine.stop, 2))
    elif mine.stop - mine.start != channels:
        rows = (*range(mine.start, mine.stop), *range(channels + mine.start, channels + mine.stop))
    return [Projection(prefix + recipe.fused, 2 * channels, rows, recipe.fused in recipe.biased, recipe.transposed)]


def gated(kernels: Kernels, gate: torch.Tensor, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns ``x`` times what the gates, of its shape and numbers, become."""
    return kernels.activated(torch.cat((gate, x), -1), activation, gated=True)


def gate_heads(kernels: Kernels, gates: torch.Tensor, values: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns ``values``, ``[tokens, heads, channels]``, times what the gates become.

    ``gates``, ``[tokens, n]``, have one number for each head, or one for each of its channels.
    """
    tokens, heads, _ = values.shape
    return gated(kernels, gates.reshape(tokens, heads, -1).expand(values.shape), values, activation)


def activation_of(kernels: Kernels, recipe: MlpRecipe) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what maps the outputs of ``inner_projections``, which it may change, to the last product's inputs."""
    activate = partial(kernels.activated, activation=recipe.activation, gated=recipe.gated)
    if recipe.gate_scale == 1.0:
        return activate

    def of_scaled(gate_up: torch.Tensor) -> torch.Tensor:
        gate_up[..., : gate_up.shape[-1] // 2] *= recipe.gate_scale
        return activate(gate_up)

    return of_scaled


class _Sparse:
    """Makes most gates 0 before the activation: those below a bound. Each gate above loses the bound."""

    def __init__(self, tp: TpGroup, recipe: MlpRecipe, activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._tp, self._channels, self._activate = tp, recipe.channels, activate
        self._deviations = NormalDist().inv_cdf(recipe.sparsity)
        """How many deviations the bound is above the mean."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gates = gate_up[..., : gate_up.shape[-1] // 2]
        numbers = gates.float()
        mean = self._mean(numbers)
        deviation = self._mean((numbers - mean).square()).sqrt()
        gates.copy_(F.relu(numbers - (mean + deviation * self._deviations)))
        return self._activate(gate_up)

    def _mean(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the mean of each token's numbers on all ranks, ``[tokens, 1]``."""
        total = numbers.sum(-1, keepdim=True)
        return (total if self._tp.size == 1 else self._tp.all_reduce(total)) / self._channels


class _Xielu:
    """An activation with two learned factors (Huang and Schlag, 2024): a square above 0, an exponential below."""

    def __init__(self, building: Building, prefix: str) -> None:
        above, below, self._beta, self._least = (
            building.checkpoint.take(f"{prefix}{name}", shape)
            for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
        )
        self._above, self._below = F.softplus(above), self._beta + F.softplus(below)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        negative = (torch.expm1(torch.minimum(x, self._least)) - x) * self._below + self._beta * x
        return torch.where(x > 0, self._above * x * x + self._beta * x, negative)
