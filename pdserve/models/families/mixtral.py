"""Mixtral, and families with its names of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.settings import HEAD_NORMS, NONE, Count, FamilySettings
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadNorm,
    MlpRecipe,
    NormScope,
)
from pdserve_kernels.routing import Scoring

EXPERT = ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2")
ROUTER = "block_sparse_moe.gate"


class MixtralSettings(FamilySettings, kw_only=True):
    models: ClassVar[str] = "Mixtral 8x7B, 8x22B"

    default_theta: ClassVar[float] = 1_000_000.0
    intermediate_size: Count = 14_336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    sliding_window: Count | None = None
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2

    def biases(self) -> frozenset[str]:
        return NONE

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        gate, up, down = EXPERT
        expert = MlpRecipe(self.intermediate_size, gate=gate, up=up, down=down)
        return ExpertsRecipe(self.num_local_experts, self.num_experts_per_tok, expert, ROUTER, normalised=True)


class MiniMaxM2Settings(MixtralSettings, kw_only=True):
    """Corrected scores, and norms over all heads together."""

    models: ClassVar[str] = "MiniMax M2"

    default_theta: ClassVar[float] = 5_000_000.0
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 200_064
    hidden_size: Count = 3072
    intermediate_size: Count = 1536
    num_hidden_layers: Count = 62
    num_attention_heads: Count = 48
    head_dim: Count | None = 128
    max_position_embeddings: Count = 196_608
    rms_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = 200_020
    num_local_experts: Count = 256
    num_experts_per_tok: Count = 8
    rotary_dim: int | None = None

    def turned_channels(self) -> int | None:
        return super().turned_channels() if self.rotary_dim is None else self.rotary_dim

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS, NormScope.ALL))

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        assert isinstance(part, ExpertsRecipe)
        correction = "block_sparse_moe.e_score_correction_bias"
        return replace(part, scoring=Scoring.SIGMOID, correction=correction)
