"""Llama 4 (Meta, 2025): layers that see chunks and know positions, and layers that see all and do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pdserve.errors import ModelError
from pdserve.models.families.settings import FULL, HEAD_NORMS, NONE, QKVO, Count, FamilySettings, check_experts, gated
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadNorm,
    MlpRecipe,
    Norm,
    QueryScale,
    Rotary,
)
from pdserve_kernels.routing import Scoring

CHUNKED = "chunked_attention"
EXPERTS = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
"""The tensors ``[experts, in, out]`` of all experts of a layer."""


class Llama4Settings(FamilySettings, kw_only=True):
    """Experts are weighed before they compute, and one more computes every token."""

    models: ClassVar[str] = "Llama 4 Scout, Maverick"
    interleaved: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Count = 202_048
    hidden_size: Count = 5120
    intermediate_size: Count = 8192
    intermediate_size_mlp: Count = 16_384
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 40
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 1
    num_local_experts: int = 16
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: int = 1
    """0 for no experts."""
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count | None = 8192
    layer_types: list[str] | None = None
    attn_temperature_tuning: bool | int = True
    floor_scale: Count = 8192
    attn_scale: float = 0.1

    def check(self) -> None:
        super().check()
        if self.no_rope_layers and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ModelError(f"no_rope_layers has to say of each of {self.num_hidden_layers} layers if it turns heads")
        if self.with_experts():
            check_experts(self.num_experts_per_tok, self.num_local_experts)

    def channels(self) -> int:
        return self.intermediate_size_mlp

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def turns(self, index: int) -> bool:
        """Returns whether a layer knows positions. ``no_rope_layers`` has 1 for one that does."""
        if self.no_rope_layers:
            return bool(self.no_rope_layers[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def windows(self) -> tuple[int | None, ...]:
        layers, size = self.num_hidden_layers, self.attention_chunk_size
        usual = [CHUNKED if self.turns(i) and size is not None else FULL for i in range(layers)]
        kinds = usual if self.layer_types is None else self.layer_types
        if len(kinds) != layers or not set(kinds) <= {FULL, CHUNKED}:
            raise ModelError(f"layer_types must be one of {FULL!r} and {CHUNKED!r} for each of {layers} layers")
        if size is None and CHUNKED in kinds:
            raise ModelError(f"there are layers with {CHUNKED!r}, but no attention_chunk_size")
        return tuple(size if kind == CHUNKED else None for kind in kinds)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary() if self.turns(index) else None

    def attention(self, index: int) -> AttentionRecipe:
        turns, part = self.turns(index), super().attention(index)
        norms = HeadNorm(Norm(self.rms_norm_eps, weighted=False), *HEAD_NORMS, after_rotary=True)
        grows = bool(self.attn_temperature_tuning) and not turns
        return replace(
            part,
            chunked=part.window is not None,
            norms=norms if self.use_qk_norm and turns else None,
            query_scale=QueryScale(self.attn_scale, self.floor_scale, first=1) if grows else None,
        )

    def with_experts(self) -> Sequence[int]:
        """Returns the layers that have experts."""
        if self.moe_layers is not None:
            return self.moe_layers
        step = self.interleave_moe_layer_step
        return range(step - 1, self.num_hidden_layers, step) if step > 0 else ()

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if index not in self.with_experts():
            return gated("feed_forward", self.intermediate_size_mlp)
        fused, down = EXPERTS
        return ExpertsRecipe(
            self.num_local_experts,
            self.num_experts_per_tok,
            MlpRecipe(self.intermediate_size, fused=f"{fused}.{{}}", down=f"{down}.{{}}", transposed=True),
            router="feed_forward.router",
            scoring=Scoring.SIGMOID_OF_CHOSEN,
            weighs_inputs=True,
            shared=gated("feed_forward.shared_expert", self.intermediate_size),
            stacked=tuple((name, f"{name}.{{}}.weight") for name in EXPERTS),
        )
