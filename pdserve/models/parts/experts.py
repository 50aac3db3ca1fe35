"""Computes experts: a router sends each token to a few of many feed-forward parts (Shazeer et al., 2017)."""

from __future__ import annotations

from dataclasses import replace

import torch

from pdserve.errors import ModelError
from pdserve.models.parts.feed_forward import Mlp, inner_projections
from pdserve.models.parts.norms import LoadedNorm, RmsNorm, load_norm
from pdserve.models.parts.projections import Building, column_weights
from pdserve.models.recipe import ExpertsRecipe, MlpBesideExperts, MlpRecipe, Norm
from pdserve.models.tp.shares import expert_share
from pdserve_kernels.contract import ExpertsForm, ExpertWeights
from pdserve_kernels.feed_forward import Activation

NEVER = -1e4
"""The logit of an expert that is not chosen, beside those that are."""


class Experts:
    """The experts of a layer and their router.

    A rank has some of the experts, or a part of the channels of each, whichever makes the better products.
    """

    def __init__(
        self, hidden_size: int, building: Building, recipe: ExpertsRecipe, prefix: str, vocab_size: int = 0
    ) -> None:
        """Takes the tensors whose names begin with ``prefix``. Raises ModelError if the rule cannot choose experts.

        ``vocab_size`` is for experts that are chosen by token.
        """
        checkpoint = building.checkpoint
        self._tp, self._precise = building.tp, recipe.precise_router
        precise = torch.float32 if recipe.precise_router else None
        router = checkpoint.take(f"{prefix}{recipe.router}.weight", (recipe.count, hidden_size), dtype=precise)
        bias = None
        if recipe.router_biased:
            bias = checkpoint.take(f"{prefix}{recipe.router}.bias", (recipe.count,), dtype=precise)
        self._kernels = building.kernels
        self._router = building.kernels.linear(router, bias)
        correction = None
        if recipe.correction and (not recipe.correction_optional or checkpoint.has(f"{prefix}{recipe.correction}")):
            shape = recipe.correction_shape or (recipe.count,)
            correction = checkpoint.take(f"{prefix}{recipe.correction}", shape, dtype=torch.float32).flatten()
        factors = checkpoint.take(f"{prefix}{recipe.factors}", (recipe.count,)) if recipe.factors else None
        expert = _expert_recipe(hidden_size, building, recipe, prefix)
        if expert.gate_scale != 1.0:
            raise ModelError(f"gates of experts that are multiplied by {expert.gate_scale} are not supported")
        with_weights = recipe.count - recipe.identities
        own, mine = expert_share(building.tp, with_weights, expert.channels)
        form = ExpertsForm(
            recipe.count,
            hidden_size,
            mine.stop - mine.start,
            checkpoint.dtype,
            recipe.routing,
            expert.activation,
            expert.gated,
            recipe.weighs_inputs,
            correction,
            factors,
            own if len(own) < recipe.count else None,
            # The sum over the ranks has to have once what these give.
            recipe.identities if building.tp.rank == 0 else 0,
        )
        try:
            form.routing.check(form.count)
        except ValueError as exc:
            raise ModelError(f"{checkpoint.path}: {exc}") from exc
        for number in set(range(with_weights)).difference(own):
            _leave(hidden_size, building, _numbered(expert, number), prefix)
        for number in range(with_weights, recipe.count):
            _leave_unused(hidden_size, building, _numbered(expert, number), prefix)
        weights = (_expert(hidden_size, building, _numbered(expert, i), prefix, mine) for i in own)
        self._experts = building.kernels.experts(form, weights)
        self._shared = None if recipe.shared is None else Mlp(hidden_size, building, recipe.shared, prefix)
        self._by_token = None
        if recipe.by_token:
            self._by_token = _experts_by_token(building, recipe, prefix, vocab_size)
        self._shared_gate = None
        if recipe.shared_gate:
            gate = checkpoint.take(f"{prefix}{recipe.shared_gate}.weight", (1, hidden_size))
            self._shared_gate = building.kernels.linear(gate)

    def __call__(
        self, x: torch.Tensor, routed: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps ``[tokens, hidden_size]`` to the same shape. ``routed`` is what the router is given if not ``x``.

        ``token_ids``, ``[tokens]``, are for experts that are chosen by them.
        """
        given = x if routed is None else routed
        logits = self._router(given.float() if self._precise else given)
        if self._by_token is not None:
            assert token_ids is not None, "experts by token need the tokens"
            chosen = self._by_token[token_ids]
            logits = torch.full_like(logits, NEVER).scatter_(-1, chosen, logits.gather(-1, chosen))
        return self._tp.all_reduce(self._experts(x, logits, self._beside(x)))

    def _beside(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns this rank's part of the shared expert."""
        if self._shared is None:
            return None
        shared = self._shared.part(x)
        if self._shared_gate is None:
            return shared
        return self._kernels.activated(self._shared_gate(x), Activation.SIGMOID, gated=False) * shared


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


def _experts_by_token(building: Building, recipe: ExpertsRecipe, prefix: str, vocab_size: int) -> torch.Tensor:
    """Returns the numbers of the experts of each token id, ``[vocab_size, chosen]``."""
    name = prefix + recipe.by_token
    table = building.checkpoint.take(name, (vocab_size, recipe.chosen), dtype=torch.int64)
    if not table.is_meta:
        ordered = table.sort(-1).values
        if not ((ordered >= 0) & (ordered < recipe.count)).all() or (ordered[:, 1:] == ordered[:, :-1]).any():
            raise ModelError(
                f"{building.checkpoint.path}: {name!r} needs {recipe.chosen} experts of {recipe.count} for each token"
            )
    return table


def _expert_recipe(hidden_size: int, building: Building, recipe: ExpertsRecipe, prefix: str) -> MlpRecipe:
    """Returns one expert as the files have it, and gives the parts of tensors of all experts names of their own."""
    checkpoint, expert = building.checkpoint, recipe.expert
    if recipe.apart is not None and not any(checkpoint.has(prefix + whole) for whole, _ in recipe.stacked):
        expert = recipe.apart
    else:
        for whole, each in recipe.stacked:
            checkpoint.unstack(prefix + whole, prefix + each, recipe.count)
    if recipe.turned_by_shape:
        fused = f"{prefix}{_numbered(expert, 0).fused}.weight"
        down = f"{prefix}{_numbered(expert, 0).down}.weight"
        # Both tell it, because one of them may be square.
        straight = (2 * expert.channels, hidden_size), (hidden_size, expert.channels)
        return replace(expert, transposed=(checkpoint.shape(fused), checkpoint.shape(down)) != straight)
    return expert


def _numbered(expert: MlpRecipe, number: int) -> MlpRecipe:
    """Returns a recipe of one expert with its number in its names."""
    gate, up, down, fused = (
        name.replace("{}", str(number)) for name in (expert.gate, expert.up, expert.down, expert.fused)
    )
    biased = frozenset(name.replace("{}", str(number)) for name in expert.biased)
    return replace(expert, gate=gate, up=up, down=down, fused=fused, biased=biased)


def _expert(hidden_size: int, building: Building, recipe: MlpRecipe, prefix: str, mine: slice) -> ExpertWeights:
    """Takes an expert's tensors."""
    weights, found = column_weights(building, hidden_size, inner_projections(recipe, prefix, mine))
    biases = [bias for bias in found if bias is not None]
    shape = (hidden_size, recipe.channels)
    down = building.weight(f"{prefix}{recipe.down}.weight", shape, columns=mine, transposed=recipe.transposed)
    bias = None
    if recipe.down in recipe.biased:
        bias = building.checkpoint.take(f"{prefix}{recipe.down}.bias", (hidden_size,))
    # The sum over the ranks is taken once a layer, not once an expert. Of ranks that share one, rank 0 has its bias.
    own = bias if building.tp.rank == 0 or mine == slice(0, recipe.channels) else None
    return ExpertWeights(tuple(weights), down, torch.cat(biases) if biases else None, own)


def _leave_unused(hidden_size: int, building: Building, recipe: MlpRecipe, prefix: str) -> None:
    """Leaves the gates and ups that a file has under the number of an expert that has no weights."""
    for part in inner_projections(recipe, prefix, slice(0, recipe.channels)):
        if building.checkpoint.has(f"{part.name}.weight"):
            building.checkpoint.leave(f"{part.name}.weight", (part.outputs, hidden_size), transposed=part.transposed)


def _leave(hidden_size: int, building: Building, recipe: MlpRecipe, prefix: str) -> None:
    """Leaves an expert's tensors to the rank that has it."""
    whole = slice(0, recipe.channels)
    for part in inner_projections(recipe, prefix, whole):
        building.checkpoint.leave(f"{part.name}.weight", (part.outputs, hidden_size), transposed=part.transposed)
        if part.biased:
            building.checkpoint.leave(f"{part.name}.bias", (part.outputs,))
    shape = (hidden_size, recipe.channels)
    building.checkpoint.leave(f"{prefix}{recipe.down}.weight", shape, transposed=recipe.transposed)
    if recipe.down in recipe.biased:
        building.checkpoint.leave(f"{prefix}{recipe.down}.bias", (hidden_size,))
