"""Cohere's Command R, R7B and A: attention and feed-forward part beside each other, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.settings import FULL, HEAD_NORMS, NONE, QKVO, SLIDING, Count, FamilySettings, windows_of
from pdserve.models.recipe import (
    AttentionRecipe,
    HeadNorm,
    LayerRecipe,
    ModelRecipe,
    Norm,
    NormKind,
    NormOrder,
    NormScope,
    Rotary,
)


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
