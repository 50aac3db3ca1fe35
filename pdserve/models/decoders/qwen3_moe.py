"""Computes Qwen3-MoE's feed-forward part: a router sends each token to a few of many experts (Shazeer et al., 2017).

The rest of the model is ``llama.LlamaDecoder``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.family_settings import ExpertSettings
from pdserve.models.decoders.layers import Building, column_parallel, gate_and_up
from pdserve.models.decoders.llama import FeedForward, dense
from pdserve.models.tp.shares import share
from pdserve_kernels.contract import Linear


def sparse_or_dense(config: FamilyConfig, building: Building, prefix: str, index: int) -> FeedForward:
    """Returns experts, or one gated MLP in the layers for which the configuration says so."""
    if config.experts is None or index not in config.experts.layers:
        return dense(config, building, prefix, index)
    return Experts(config.experts, config.hidden_size, building, prefix)


@dataclass(frozen=True, slots=True)
class Expert:
    """One gated MLP, with this rank's part of its channels."""

    gate_up: Linear
    down: Linear


class Experts:
    """All experts of a layer and their router. Only the experts that a step's tokens are sent to are computed."""

    def __init__(self, settings: ExpertSettings, hidden_size: int, building: Building, prefix: str) -> None:
        self._kernels, self._tp = building.kernels, building.tp
        self._router = building.kernels.linear(
            building.checkpoint.take(f"{prefix}.gate.weight", (settings.count, hidden_size))
        )
        self._chosen = settings.chosen
        self._normalised = settings.normalised
        mine = share(building.tp, settings.channels, "channels of an expert")
        self._experts = [
            _expert(building, f"{prefix}.experts.{i}", (hidden_size, settings.channels), mine)
            for i in range(settings.count)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, hidden_size]`` to the same shape."""
        weights, experts = self._route(x)
        order = experts.flatten().argsort(stable=True)
        tokens, weights = order // self._chosen, weights.flatten()[order].unsqueeze(1)
        chosen = experts.flatten()
        counts = chosen.new_zeros(len(self._experts)).scatter_add_(0, chosen, torch.ones_like(chosen))
        out, first = torch.zeros_like(x), 0
        for expert, count in zip(self._experts, self._tp.read(counts), strict=True):
            if count:
                group = slice(first, first + count)
                inner = self._kernels.silu_and_mul(expert.gate_up(x[tokens[group]]))
                out.index_add_(0, tokens[group], expert.down(inner) * weights[group])
                first += count
        return self._tp.all_reduce(out)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights and the indexes of each token's experts, both ``[tokens, chosen]``."""
        probabilities = self._router(x).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._chosen, -1)
        if self._normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts


def _expert(building: Building, prefix: str, shape: tuple[int, int], mine: slice) -> Expert:
    """Takes an expert, whose last projection has ``shape``."""
    hidden_size, channels = shape
    down = building.checkpoint.take_unread(f"{prefix}.down_proj.weight", shape, columns=mine)
    return Expert(
        gate_up=column_parallel(building, hidden_size, gate_and_up(prefix, channels, mine)),
        # The sum over the ranks is taken once a layer, not once an expert.
        down=building.linear(down),
    )
