"""Computes experts: a router sends each token to a few of many feed-forward parts (Shazeer et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from pdserve.models.parts.feed_forward import Mlp, activation_of, inner_projections
from pdserve.models.parts.norms import LoadedNorm, RmsNorm, load_norm
from pdserve.models.parts.projections import Building, column_parallel
from pdserve.models.recipe import ExpertsRecipe, MlpBesideExperts, MlpRecipe, Norm
from pdserve.models.tp.shares import share
from pdserve_kernels import reference
from pdserve_kernels.contract import Linear


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert, with this rank's part of its channels."""

    inner: Linear
    down: Linear


class Experts:
    """All experts of a layer and their router. Only the experts that a step's tokens are sent to are computed."""

    def __init__(self, hidden_size: int, building: Building, recipe: ExpertsRecipe, prefix: str) -> None:
        """Takes the tensors whose names begin with ``prefix``."""
        checkpoint = building.checkpoint
        self._recipe, self._tp = recipe, building.tp
        precise = torch.float32 if recipe.precise_router else None
        router = checkpoint.take(f"{prefix}{recipe.router}.weight", (recipe.count, hidden_size), dtype=precise)
        bias = checkpoint.take(f"{prefix}{recipe.router}.bias", (recipe.count,)) if recipe.router_biased else None
        self._router = _Precise(router) if recipe.precise_router else building.kernels.linear(router, bias)
        self._correction = (
            checkpoint.take(
                f"{prefix}{recipe.correction}", recipe.correction_shape or (recipe.count,), dtype=torch.float32
            ).flatten()
            if recipe.correction
            else None
        )
        self._factors = checkpoint.take(f"{prefix}{recipe.factors}", (recipe.count,)) if recipe.factors else None
        expert = recipe.expert
        if recipe.apart is not None and not any(checkpoint.has(prefix + whole) for whole, _ in recipe.stacked):
            expert = recipe.apart
        else:
            for whole, each in recipe.stacked:
                checkpoint.unstack(prefix + whole, prefix + each, recipe.count)
        if recipe.turned_by_shape:
            fused = f"{prefix}{_numbered(expert, 0).fused}.weight"
            expert = replace(expert, transposed=checkpoint.shape(fused) != (2 * expert.channels, hidden_size))
        mine = share(building.tp, expert.channels, "channels of an expert")
        self._experts = [
            _expert(hidden_size, building, _numbered(expert, i), prefix, mine) for i in range(recipe.count)
        ]
        self._activate = activation_of(building.kernels, recipe.expert)
        self._shared = None if recipe.shared is None else Mlp(hidden_size, building, recipe.shared, prefix)
        self._shared_gate = None
        if recipe.shared_gate:
            gate = checkpoint.take(f"{prefix}{recipe.shared_gate}.weight", (1, hidden_size))
            self._shared_gate = building.kernels.linear(gate)

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Maps ``[tokens, hidden_size]`` to the same shape. ``routed`` is what the router is given if not ``x``."""
        weights, experts = self._route(x if routed is None else routed)
        order = experts.flatten().argsort(stable=True)
        tokens, weights = order // self._recipe.chosen, weights.flatten()[order].unsqueeze(1)
        chosen = experts.flatten()
        counts = chosen.new_zeros(len(self._experts)).scatter_add_(0, chosen, torch.ones_like(chosen))
        out, first = torch.zeros_like(x), 0
        for expert, count in zip(self._experts, self._tp.read(counts), strict=True):
            if count:
                group = slice(first, first + count)
                mine = tokens[group]
                if self._recipe.weighs_inputs:
                    result = expert.down(self._activate(expert.inner(x[mine] * weights[group])))
                else:
                    result = expert.down(self._activate(expert.inner(x[mine]))) * weights[group]
                # An expert has a token once. For a few rows, ``index_add_`` takes longer than the products.
                out[mine] = result.add_(out[mine])
                first += count
        out = self._tp.all_reduce(out)
        if self._shared is None:
            return out
        shared = self._shared(x)
        return out + (shared if self._shared_gate is None else self._shared_gate(x).sigmoid() * shared)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights and the indexes of each token's experts, both ``[tokens, chosen]``."""
        weights, experts = reference.route(self._router(x), self._recipe.routing, self._correction, self._factors)
        return weights.to(x.dtype), experts


class BesideExperts:
    """A feed-forward part and experts, each with its norms, whose results are added."""

    def __init__(self, hidden_size: int, building: Building, recipe: MlpBesideExperts, norm: Norm, prefix: str) -> None:
        """Takes the tensors whose names begin with ``prefix``."""

        def loaded(name: str) -> LoadedNorm:
            return load_norm(building, norm, prefix + name, hidden_size)

        self._before_mlp, self._after_mlp = loaded(recipe.before_mlp), loaded(recipe.after_mlp)
        self._before_experts, self._after_experts = loaded(recipe.before_experts), loaded(recipe.after_experts)
        self._mlp = Mlp(hidden_size, building, recipe.mlp, prefix)
        self._experts = Experts(hidden_size, building, recipe.experts, prefix)
        weights = building.checkpoint.take(f"{prefix}{recipe.router_weights}", (hidden_size,))
        self._before_router = RmsNorm(building.kernels, weights * recipe.router_scale, norm.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps the residual, ``[tokens, hidden_size]``, to the same shape."""
        own = self._after_mlp(self._mlp(self._before_mlp(x)))
        return own + self._after_experts(self._experts(self._before_experts(x), self._before_router(x)))


@dataclass(frozen=True, slots=True)
class _Precise:
    """A product in fp32."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight)


def _numbered(expert: MlpRecipe, number: int) -> MlpRecipe:
    """Returns a recipe of one expert with its number in its names."""
    gate, up, down, fused = (
        name.replace("{}", str(number)) for name in (expert.gate, expert.up, expert.down, expert.fused)
    )
    biased = frozenset(name.replace("{}", str(number)) for name in expert.biased)
    return replace(expert, gate=gate, up=up, down=down, fused=fused, biased=biased)


def _expert(hidden_size: int, building: Building, recipe: MlpRecipe, prefix: str, mine: slice) -> Expert:
    """Takes an expert's tensors."""
    shape = (hidden_size, recipe.channels)
    name, turned = f"{prefix}{recipe.down}.weight", recipe.transposed
    down = building.weight(name, shape, columns=mine, transposed=turned)
    bias = None
    if recipe.down in recipe.biased:
        bias = building.checkpoint.take(f"{prefix}{recipe.down}.bias", (hidden_size,))
    return Expert(
        inner=column_parallel(building, hidden_size, inner_projections(recipe, prefix, mine)),
        # The sum over the ranks is taken once a layer, not once an expert. Only rank 0 has the bias in it.
        down=building.linear(down, bias if building.tp.rank == 0 else None),
    )
