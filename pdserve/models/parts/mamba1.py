"""Mixes tokens by the first Mamba (Gu and Dao, 2023): a short convolution, and numbers that each token updates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.norms import RmsNorm
from pdserve.models.parts.projections import Building, Projection, RowParallel, column_parallel
from pdserve.models.recipe import MambaRecipe
from pdserve.models.tp.shares import share, spread
from pdserve_kernels.contract import StateRuns


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
        self._norms = [
            RmsNorm(building.kernels, checkpoint.take(f"{prefix}{name}.weight", (count,)), recipe.norm.eps)
            for name, count in zip(recipe.norms, self._sizes, strict=True)
        ]
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
        lengths, write, read = (norm(each.contiguous()) for norm, each in zip(self._norms, selected, strict=True))
        steps = F.softplus(self._steps(lengths).float() + self._step_bias).view(tokens, parts, recipe.channels)
        numbers = state[..., before:].view(-1, parts, recipe.channels, recipe.size)
        found = self._kernels.mamba_scan(
            convolved, steps, write.float(), read.float(), self._rate, self._skip, numbers, runs
        )
        return self._out((found.view(tokens, -1).float() * F.silu(gate.float())).to(x.dtype))
