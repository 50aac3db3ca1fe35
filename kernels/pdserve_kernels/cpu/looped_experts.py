"""Computes experts one after another, with the products of any set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pdserve_kernels import reference
from pdserve_kernels.contract import BlockWeight, ExpertsForm, ExpertWeights, Linear, UnreadWeight

MakeLinear = Callable[[UnreadWeight | BlockWeight, torch.Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class _Expert:
    inner: Sequence[Linear]
    """One product, or those of gates and of ups."""
    down: Linear


class LoopedExperts:
    """Satisfies ``contract.Experts``. Only the experts that a step's rows are sent to are computed."""

    def __init__(self, form: ExpertsForm, weights: Iterable[ExpertWeights], linear: MakeLinear) -> None:
        form.routing.check(form.count)
        self._form = form
        self._experts = [_expert(each, linear) for each in weights]

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        form = self._form
        weights, experts = reference.route(logits, form.routing, form.correction, form.factors)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        tokens, weights = order // form.routing.chosen, weights.to(x.dtype).flatten()[order].unsqueeze(1)
        out, first = torch.zeros_like(x) if beside is None else beside.clone(), 0
        counts: list[int] = chosen.bincount(minlength=form.count).tolist()
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                group = slice(first, first + count)
                mine = tokens[group]
                given = x[mine] * weights[group] if form.weighs_inputs else x[mine]
                inner = torch.cat([linear(given) for linear in expert.inner], 1)
                result = expert.down(reference.activated(inner, form.activation, gated=form.gated))
                if not form.weighs_inputs:
                    result = result * weights[group]
                # An expert has a token once. For a few rows, ``index_add_`` takes longer than the products.
                out[mine] += result
                first += count
        return out


def _expert(weights: ExpertWeights, linear: MakeLinear) -> _Expert:
    parts: list[torch.Tensor | None] = [None] * len(weights.inner)
    if weights.inner_bias is not None:
        parts = [*weights.inner_bias.chunk(len(weights.inner))]
    inner = [linear(weight, bias) for weight, bias in zip(weights.inner, parts, strict=True)]
    return _Expert(inner, linear(weights.down, weights.down_bias))
