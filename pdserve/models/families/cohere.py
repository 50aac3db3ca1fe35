"""Cohere's Command R, R7B and A: attention and feed-forward part beside each other, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.errors import ModelError
from pdserve.models.families.deepseek import DENSE, check_kinds, first_dense
from pdserve.models.families.settings import (
    FULL,
    HEAD_NORMS,
    NONE,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    check_experts,
    gated,
    gated_expert,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadNorm,
    LayerRecipe,
    ModelRecipe,
    Norm,
    NormKind,
    NormOrder,
    NormScope,
    PartScales,
    Rotary,
)
from pdserve_kernels.feed_forward import Scoring

SCORINGS = {"softmax": Scoring.SOFTMAX_OF_CHOSEN, "sigmoid": Scoring.SIGMOID_OF_CHOSEN}
"""How experts are weighed, by the names of ``expert_selection_fn``."""
SHARED_PARTS = {"average": 0.5, "sum": 1.0}
"""What experts and the shared one are multiplied by, by the names of ``shared_expert_combination_strategy``."""


class CohereSettings(FamilySettings, kw_only=True):
    models: ClassVar[str] = "Command R, Command R+, Aya 23"

    default_theta: ClassVar[float] = 500_000.0
    interleaved: ClassVar[bool] = True
    vocab_size: Count = 256_000
    hidden_size: Count = 8192
    intermediate_size: Count = 22_528
    num_hidden_layers: Count = 40
    num_attention_heads: Count = 64
    max_position_embeddings: Count = 8192
    layer_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 255_001
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    use_qk_norm: bool = False

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def norm(self) -> Norm:
        return Norm(self.layer_norm_eps, NormKind.LAYER)

    def attention(self, index: int) -> AttentionRecipe:
        norms = HeadNorm(self.norm(), *HEAD_NORMS, NormScope.EACH_HEAD) if self.use_qk_norm else None
        return replace(super().attention(index), norms=norms)

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("input_layernorm",), order=NormOrder.PARALLEL)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), logits_scale=self.logit_scale)


class Cohere2Settings(CohereSettings, kw_only=True):
    """Layers that see everything do not know positions; the others see a window."""

    models: ClassVar[str] = "Command R7B, Command A"

    default_theta: ClassVar[float] = 10_000.0
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 4
    layer_types: list[str] | None = None

    def windows(self) -> tuple[int | None, ...]:
        numbers = range(1, self.num_hidden_layers + 1)
        usual = [SLIDING if number % self.sliding_window_pattern else FULL for number in numbers]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return None if self.windows()[index] is None else self.rotary()


class Cohere2MoeSettings(Cohere2Settings, kw_only=True):
    """Command A with experts. The first layers may have none, and know positions even if they see everything."""

    models: ClassVar[str] = "Command A with experts"
    head_dim: Count | None = 128
    rms_norm_eps: float | None = None  # type: ignore[assignment]  # norms are layer norms unless a file says it
    num_experts: Count = 8
    num_experts_per_tok: Count = 2
    num_shared_experts: int = 0
    shared_expert_combination_strategy: str = "average"
    expert_selection_fn: str = "softmax"
    norm_topk_prob: bool = True
    mlp_layer_types: list[str] | None = None
    first_k_dense_replace: int = 0
    prefix_dense_sliding_window_pattern: Count = 1
    prefix_dense_intermediate_size: Count | None = None

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts_per_tok, self.num_experts)
        check_kinds(self.kinds(), self.num_hidden_layers)
        for name, known in (("expert_selection_fn", SCORINGS), ("shared_expert_combination_strategy", SHARED_PARTS)):
            given = getattr(self, name)
            if given not in known:
                raise ModelError(f"{name} {given!r} is not supported; supported: {', '.join(map(repr, known))}")

    def kinds(self) -> list[str]:
        """Returns for each layer whether its feed-forward part is one, or of experts."""
        return self.mlp_layer_types or first_dense(self.first_k_dense_replace, self.num_hidden_layers)

    def windows(self) -> tuple[int | None, ...]:
        dense, layers = self.first_k_dense_replace, self.num_hidden_layers
        counts = ((dense, self.prefix_dense_sliding_window_pattern), (layers - dense, self.sliding_window_pattern))
        usual = [SLIDING if (i + 1) % every else FULL for count, every in counts for i in range(count)]
        return windows_of(self.layer_types, usual, layers, self.sliding_window)

    def norm(self) -> Norm:
        return super().norm() if self.rms_norm_eps is None else Norm(self.rms_norm_eps)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        forced = self.kinds()[index] == DENSE and self.prefix_dense_sliding_window_pattern == 1
        return self.rotary() if forced else super().rotary_of_layer(index)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if self.kinds()[index] == DENSE:
            return replace(self.mlp(), channels=self.prefix_dense_intermediate_size or self.intermediate_size)
        scoring, shared = SCORINGS[self.expert_selection_fn], self.intermediate_size * self.num_shared_experts
        return ExpertsRecipe(
            self.num_experts,
            self.num_experts_per_tok,
            gated_expert(self.intermediate_size),
            scoring=scoring,
            normalised=self.norm_topk_prob and scoring is Scoring.SIGMOID_OF_CHOSEN,
            shared=gated("mlp.shared_experts", shared) if shared else None,
        )

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        if not isinstance(layer.feed_forward, ExpertsRecipe) or layer.feed_forward.shared is None:
            return layer
        part = SHARED_PARTS[self.shared_expert_combination_strategy]
        return replace(layer, scales=PartScales(feed_forward_out=part))
