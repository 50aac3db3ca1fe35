"""OLMo 1 to 3 and OLMoE: norms without weights, behind each part, and over all heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.settings import (
    FULL,
    HEAD_NORMS,
    NONE,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    gated_expert,
    rotary_of,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadNorm,
    LayerRecipe,
    Norm,
    NormKind,
    NormOrder,
    NormScope,
    Rotary,
)

NORMS_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")


class OlmoSettings(FamilySettings, kw_only=True):
    """OLMo 1: layer norms without weights."""

    models: ClassVar[str] = "OLMo 1"
    vocab_size: Count = 50_304
    eos_token_id: int | list[int] | None = 50_279
    clip_qkv: float | None = None

    def left_to_transformers(self) -> bool:
        return self.clip_qkv is not None

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def norm(self) -> Norm:
        return Norm(1e-5, NormKind.LAYER, weighted=False)


class Olmo2Settings(FamilySettings, kw_only=True):
    """Norms stand behind attention and feed-forward part, and over all queries and all keys."""

    models: ClassVar[str] = "OLMo 2"
    vocab_size: Count = 50_304
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 50_279

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS, NormScope.ALL))

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=NORMS_BEHIND, order=NormOrder.POST)


class Olmo3Settings(Olmo2Settings, kw_only=True):
    """Every fourth layer sees everything, with scaled frequencies; the others see a window."""

    models: ClassVar[str] = "OLMo 3"

    default_theta: ClassVar[float] = 500_000.0
    sliding_window: Count | None = 4096
    layer_types: list[str] | None = None

    def windows(self) -> tuple[int | None, ...]:
        usual = [FULL if i % 4 == 3 else SLIDING for i in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary:
        theta = self.default_theta if self.rope_theta is None else self.rope_theta
        both = self.rope_parameters
        if both is not None and (both.full_attention is not None or both.sliding_attention is not None):
            own = both.full_attention if self.windows()[index] is None else both.sliding_attention
            return rotary_of(own or RotarySettings(), theta, self.max_position_embeddings)
        whole = self.rotary()
        return whole if self.windows()[index] is None else Rotary(whole.theta)


class OlmoeSettings(FamilySettings, kw_only=True):
    """Experts in every layer."""

    models: ClassVar[str] = "OLMoE 1B 7B"
    vocab_size: Count = 50_304
    hidden_size: Count = 2048
    intermediate_size: Count = 2048
    num_hidden_layers: Count = 16
    num_attention_heads: Count = 16
    max_position_embeddings: Count = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 50_279
    clip_qkv: float | None = None
    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False

    def left_to_transformers(self) -> bool:
        return self.clip_qkv is not None

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS, NormScope.ALL))

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        expert = gated_expert(self.intermediate_size)
        return ExpertsRecipe(self.num_experts, self.num_experts_per_tok, expert, normalised=self.norm_topk_prob)


class FlexOlmoSettings(OlmoeSettings, kw_only=True):
    """OLMoE's experts in the layers of OLMo 2."""

    models: ClassVar[str] = "FlexOlmo 7x7B"

    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Count = 100_352
    hidden_size: Count = 4096
    intermediate_size: Count = 11_008
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 32
    rms_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = 100_257
    num_experts: Count = 7
    num_experts_per_tok: Count = 5

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=NORMS_BEHIND, order=NormOrder.POST)
