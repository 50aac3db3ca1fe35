"""Qwen 3 Next and Qwen 3.5: gated delta nets in most layers, and gated attention in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.errors import ModelError
from pdserve.models.families.settings import FULL, HEAD_NORMS, Count, FamilySettings, gated, gated_expert
from pdserve.models.recipe import (
    AttentionRecipe,
    DeltaNetRecipe,
    DraftRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadNorm,
    LayerRecipe,
    MlpRecipe,
    ModelRecipe,
    Norm,
)

LINEAR = "linear_attention"
APART = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
"""The projections of a delta net in Qwen 3.5."""


class DeltaNetSettings(FamilySettings, kw_only=True):
    """What these families share."""

    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.25
    inner: ClassVar[tuple[str, ...]] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
    head_dim: Count | None = 256
    max_position_embeddings: Count = 32_768
    eos_token_id: int | list[int] | None = None
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32

    def check(self) -> None:
        super().check()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ModelError(
                f"{self.linear_num_value_heads} value heads (linear_num_value_heads) cannot be spread evenly over "
                f"{self.linear_num_key_heads} key heads"
            )
        if len(self.kinds()) != self.num_hidden_layers or not set(self.kinds()) <= {FULL, LINEAR}:
            raise ModelError(
                f"layer_types must be one of {FULL!r} and {LINEAR!r} for each of {self.num_hidden_layers} layers"
            )

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        every = self.full_attention_interval
        usual = [LINEAR if (index + 1) % every else FULL for index in range(self.num_hidden_layers)]
        return usual if self.layer_types is None else self.layer_types

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps, offset=1.0)

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS), gated=True)

    def delta_net(self) -> DeltaNetRecipe:
        return DeltaNetRecipe(
            heads=self.linear_num_key_heads,
            group=self.linear_num_value_heads // self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            width=self.linear_conv_kernel_dim,
            norm=Norm(self.rms_norm_eps),
            inner=self.inner,
        )

    def recipe(self) -> ModelRecipe:
        # The text part of a larger model, saved alone, may keep its names.
        renamed = (("model.language_model.", "model."),)
        last = LayerRecipe(self.attention(0), self.feed_forward(self.num_hidden_layers - 1), self.norm())
        draft = DraftRecipe(
            last,
            tensors="mtp.",
            prefix="mtp.layers.0.",
            projection="mtp.fc",
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            last_norm="mtp.norm",
        )
        return replace(super().recipe(), renamed=renamed, draft=draft)

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        return layer if self.kinds()[index] == FULL else replace(layer, attention=None, mixer=self.delta_net())


class Qwen35Settings(DeltaNetSettings, kw_only=True):
    """Queries, gates, betas and steps have projections of their own."""

    models: ClassVar[str] = "Qwen 3.5"
    inner: ClassVar[tuple[str, ...]] = APART
    three_axes: ClassVar[bool] = True
    vocab_size: Count = 248_320
    intermediate_size: Count = 12_288
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 4


class Qwen3NextSettings(DeltaNetSettings, kw_only=True):
    """Most layers have experts, and one more expert sees every token, weighed by a gate of its own."""

    models: ClassVar[str] = "Qwen 3 Next 80B A3B"
    vocab_size: Count = 151_936
    hidden_size: Count = 2048
    intermediate_size: Count = 5632
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 2
    num_experts: int = 512
    num_experts_per_tok: Count = 10
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        sparse = (index + 1) % self.decoder_sparse_step == 0 and index not in (self.mlp_only_layers or [])
        return self.experts() if self.num_experts > 0 and sparse else self.mlp()

    def experts(self) -> ExpertsRecipe:
        return ExpertsRecipe(
            self.num_experts,
            self.num_experts_per_tok,
            gated_expert(self.moe_intermediate_size),
            normalised=self.norm_topk_prob,
            shared=gated("mlp.shared_expert", self.shared_expert_intermediate_size),
            shared_gate="mlp.shared_expert_gate",
        )


class Qwen35MoeSettings(Qwen3NextSettings, kw_only=True):
    """All layers have experts, of which one tensor holds all of a layer."""

    models: ClassVar[str] = "Qwen 3.5 35B A3B, 122B A10B, 397B A17B"
    inner: ClassVar[tuple[str, ...]] = APART
    three_axes: ClassVar[bool] = True
    vocab_size: Count = 248_320
    num_hidden_layers: Count = 40
    num_experts: int = 256
    num_experts_per_tok: Count = 8

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        usual = self.experts()
        fused, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
        expert = MlpRecipe(self.moe_intermediate_size, fused=f"{fused}.{{}}", down=f"{down}.{{}}")
        stacked = tuple((name, f"{name}.{{}}.weight") for name in (fused, down))
        return replace(usual, expert=expert, apart=usual.expert, normalised=True, stacked=stacked)
