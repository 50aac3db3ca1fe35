"""gpt-oss (OpenAI, 2025): sinks, windows in every second layer, and experts with a clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.errors import ModelError
from pdserve.models.families.settings import (
    FULL,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    MlpRecipe,
    Rotary,
)
from pdserve_kernels.activations import CLAMPED_AT, CLAMPED_SLOPE, Activation
from pdserve_kernels.routing import Scoring

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


class GptOssSettings(FamilySettings, kw_only=True):
    models: ClassVar[str] = "gpt-oss 20B, 120B"
    quantisations: ClassVar[frozenset[str]] = frozenset({"mxfp4"})
    default_theta: ClassVar[float] = 150_000.0
    vocab_size: Count = 201_088
    hidden_size: Count = 2880
    intermediate_size: Count = 2880
    num_hidden_layers: Count = 36
    num_attention_heads: Count = 64
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 64
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = None
    attention_bias: bool = True
    sliding_window: Count | None = 128
    layer_types: list[str] | None = None
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def check(self) -> None:
        super().check()
        if (self.swiglu_alpha, self.swiglu_limit) != (CLAMPED_SLOPE, CLAMPED_AT):
            raise ModelError(
                f"swiglu_alpha {self.swiglu_alpha} and swiglu_limit {self.swiglu_limit} are not supported; "
                f"{CLAMPED_SLOPE} and {CLAMPED_AT} are"
            )

    def rotary(self) -> Rotary:
        if self.rope_parameters is None and self.rope_scaling is None:
            self.rope_parameters = RotarySettings(
                rope_type="yarn",
                factor=32.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=4096,
            )
        return super().rotary()

    def windows(self) -> tuple[int | None, ...]:
        usual = [FULL if index % 2 else SLIDING for index in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), sinks="self_attn.sinks")

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else frozenset()

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        names = fused, down = f"{GATE_UP}.{{}}", f"{DOWN}.{{}}"
        expert = MlpRecipe(
            self.intermediate_size,
            Activation.CLAMPED_SILU,
            fused=fused,
            down=down,
            interleaved=True,
            biased=frozenset(names),
            transposed=True,
        )
        weights = tuple((name, f"{name}.{{}}.weight") for name in (GATE_UP, DOWN))
        biases = tuple((f"{name}_bias", f"{name}.{{}}.bias") for name in (GATE_UP, DOWN))
        return ExpertsRecipe(
            self.num_local_experts,
            self.num_experts_per_tok,
            expert,
            router="mlp.router",
            router_biased=True,
            scoring=Scoring.SOFTMAX_OF_CHOSEN,
            stacked=(*weights, *biases),
        )
