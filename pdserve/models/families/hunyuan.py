"""Tencent's Hunyuan, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.settings import Count, FamilySettings, gated, gated_expert
from pdserve.models.recipe import AttentionRecipe, ExpertsRecipe, FeedForwardRecipe, HeadNorm, Rotary


class HunYuanSettings(FamilySettings, kw_only=True):
    """Tencent's Hunyuan: heads are normalised after they are turned, and frequencies may be scaled by ``alpha``."""

    models: ClassVar[str] = "Hunyuan 0.5B to 7B"

    default_theta: ClassVar[float] = 10_000.0
    vocab_size: Count = 290_943
    rms_norm_eps: float = 1e-5

    def attention(self, index: int) -> AttentionRecipe:
        names = ("self_attn.query_layernorm", "self_attn.key_layernorm")
        return replace(super().attention(index), norms=HeadNorm(self.norm(), *names, after_rotary=True))

    def rotary(self) -> Rotary:
        given = self.rope_scaling or self.rope_parameters
        if given is None or (given.rope_type or given.type) != "dynamic" or not given.alpha:
            return super().rotary()
        theta = given.rope_theta or (self.default_theta if self.rope_theta is None else self.rope_theta)
        channels = self.head_size()
        return Rotary(theta * given.alpha ** (channels / (channels - 2)))


class HunYuanMoeSettings(HunYuanSettings, kw_only=True):
    """Experts in every layer, beside one that sees every token."""

    models: ClassVar[str] = "Hunyuan A13B"
    num_experts: Count = 1
    moe_topk: Count = 1

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return ExpertsRecipe(
            self.num_experts,
            self.moe_topk,
            gated_expert(self.intermediate_size),
            router="mlp.gate.wg",
            normalised=True,
            precise_router=True,
            shared=gated("mlp.shared_mlp", self.intermediate_size),
        )
