"""Baidu's Ernie 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.settings import MLP, NONE, QKVO, Count, FamilySettings, gated, gated_expert
from pdserve.models.recipe import ExpertsRecipe, FeedForwardRecipe, ModelRecipe


class ErnieSettings(FamilySettings, kw_only=True):
    """Ernie 4.5: neighbouring channels are turned against each other."""

    models: ClassVar[str] = "ERNIE 4.5 0.3B"

    default_theta: ClassVar[float] = 500_000.0
    interleaved: ClassVar[bool] = True
    vocab_size: Count = 103_424
    hidden_size: Count = 1024
    intermediate_size: Count = 3072
    num_hidden_layers: Count = 18
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = False

    def biases(self) -> frozenset[str]:
        return QKVO | MLP if self.use_bias else NONE


class ErnieMoeSettings(ErnieSettings, kw_only=True):
    """Ernie 4.5 with experts in most layers, chosen by corrected scores, beside shared ones."""

    models: ClassVar[str] = "ERNIE 4.5 21B A3B, 300B A47B"
    hidden_size: Count = 2560
    intermediate_size: Count = 12_288
    num_hidden_layers: Count = 28
    num_attention_heads: Count = 20
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = None
    moe_intermediate_size: Count = 1536
    moe_k: Count = 6
    moe_num_experts: Count = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: Count = 1
    moe_norm_min: float = 1e-12

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        if (index + 1) % self.moe_layer_interval or not self.moe_layer_start_index <= index <= last:
            return self.mlp()
        channels, shared = self.moe_intermediate_size, None
        if self.moe_num_shared_experts > 0:
            shared = gated("mlp.shared_experts", channels * self.moe_num_shared_experts, biased=self.use_bias)
        return ExpertsRecipe(
            self.moe_num_experts,
            self.moe_k,
            gated_expert(channels),
            normalised=True,
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_shape=(1, self.moe_num_experts),
            precise_router=True,
            shared=shared,
        )

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), head_biased=self.use_bias)
