"""Liquid AI's LFM2 and LFM3: gated short convolutions in most or half of the layers, and attention in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.errors import ModelError
from pdserve.models.families.settings import (
    FULL,
    HEAD_NORMS,
    NONE,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    check_layer_types,
    rotary_of,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    GateRecipe,
    HeadNorm,
    LayerRecipe,
    MlpRecipe,
    ModelRecipe,
    Norm,
    NormOrder,
    Rotary,
    ShortConvRecipe,
)
from pdserve_kernels.feed_forward import Scoring

CONV = "conv"


def _mlp(channels: int, prefix: str = "feed_forward") -> MlpRecipe:
    return MlpRecipe(channels, gate=f"{prefix}.w1", up=f"{prefix}.w3", down=f"{prefix}.w2")


class LfmSettings(FamilySettings, kw_only=True):
    """What an LFM2 and an LFM3 share."""

    max_position_embeddings: Count = 128_000
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: Count = 3

    def norm(self) -> Norm:
        return Norm(self.norm_eps)

    def short_conv(self) -> ShortConvRecipe:
        heads = self.num_attention_heads
        return ShortConvRecipe(heads, self.hidden_size // heads, self.conv_L_cache, self.conv_bias)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), last_norm="model.embedding_norm")


class Lfm2Settings(LfmSettings, kw_only=True):
    models: ClassVar[str] = "LFM2 350M, 700M, 1.2B, 2.6B"
    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Count = 65_536
    hidden_size: Count = 2560
    intermediate_size: Count = 12_288
    num_key_value_heads: Count | None = 8
    tie_embedding: bool | None = None
    """What older files call ``tie_word_embeddings``."""
    block_ff_dim: Count | None = None
    """What older files call ``intermediate_size``."""
    block_multiple_of: Count = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    layer_types: list[str] | None = None

    def check(self) -> None:
        super().check()
        check_layer_types(self.kinds(), self.num_hidden_layers, FULL, CONV)

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        numbers = range(self.num_hidden_layers)
        full = numbers if self.full_attn_idxs is None else self.full_attn_idxs
        return [FULL if index in full else CONV for index in numbers]

    def channels(self) -> int:
        channels = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return channels
        channels = int(2 * channels / 3)
        if self.block_ffn_dim_multiplier is None:
            return channels
        adjusted = int(self.block_ffn_dim_multiplier * channels)
        return -(-adjusted // self.block_multiple_of) * self.block_multiple_of

    def attention(self, index: int) -> AttentionRecipe:
        norms = HeadNorm(self.norm(), "self_attn.q_layernorm", "self_attn.k_layernorm")
        return replace(super().attention(index), norms=norms, out="self_attn.out_proj")

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return _mlp(self.channels())

    def layer(self, index: int) -> LayerRecipe:
        layer = replace(super().layer(index), norms=("operator_norm", "ffn_norm"))
        return layer if self.kinds()[index] == FULL else replace(layer, attention=None, mixer=self.short_conv())

    def recipe(self) -> ModelRecipe:
        tied = self.tie_word_embeddings if self.tie_embedding is None else self.tie_embedding
        return replace(super().recipe(), tied=tied)


class Lfm3Settings(LfmSettings, kw_only=True):
    """Half of the attention has windows, and each head one gate. Parts have norms before and behind them."""

    models: ClassVar[str] = "LFM3 1.7B"
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 128_000
    hidden_size: Count = 2048
    intermediate_size: Count = 7680
    num_hidden_layers: Count = 24
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 128
    eos_token_id: int | list[int] | None = 124_900
    conv_L_cache: Count = 7
    sliding_window: Count | None = 256
    layer_types: list[str] | None = None
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    def check(self) -> None:
        super().check()
        self.windows()
        if self.rope_scaling is not None:
            raise ModelError("rope_scaling of an LFM3 is not supported; rope_parameters is")

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        usual = [CONV if index % 2 or not index else SLIDING for index in range(self.num_hidden_layers)]
        usual[2::4] = [FULL] * len(usual[2::4])
        return usual if self.layer_types is None else self.layer_types

    def windows(self) -> tuple[int | None, ...]:
        # A convolution keeps a state, and no tokens.
        seeing = [FULL if kind == CONV else kind for kind in self.kinds()]
        return windows_of(seeing, (), self.num_hidden_layers, self.sliding_window)

    def turned_channels(self) -> int | None:
        return None  # each kind of layer has its own

    def rotary_of_layer(self, index: int) -> Rotary:
        usual = RotarySettings(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1_000_000.0)
        own = self.rotary_of_kind(usual, full=self.windows()[index] is None)
        return rotary_of(own, self.default_theta, self.max_position_embeddings)

    def attention(self, index: int) -> AttentionRecipe:
        part = replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS))
        return replace(part, gate=GateRecipe("self_attn.gate_proj", one=True)) if self.use_attention_gate else part

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return _mlp(self.intermediate_size)

    def layer(self, index: int) -> LayerRecipe:
        layer = replace(super().layer(index), norms=("operator_norm", "ffn_norm"))
        if self.use_sandwich_norm:
            norms = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
            layer = replace(layer, norms=norms, order=NormOrder.SANDWICH)
        return layer if self.kinds()[index] != CONV else replace(layer, attention=None, mixer=self.short_conv())


class Lfm2MoeSettings(Lfm2Settings, kw_only=True):
    """All layers but the first have experts."""

    models: ClassVar[str] = "LFM2 8B A1B"
    hidden_size: Count = 2048
    intermediate_size: Count = 7168
    block_auto_adjust_ff_dim: bool = False
    moe_intermediate_size: Count = 1792
    num_dense_layers: int = 2
    num_experts: Count = 32
    num_experts_per_tok: Count = 4
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if index < self.num_dense_layers:
            return _mlp(self.channels())
        return ExpertsRecipe(
            self.num_experts,
            self.num_experts_per_tok,
            _mlp(self.moe_intermediate_size, "feed_forward.experts.{}"),
            router="feed_forward.gate",
            scoring=Scoring.SIGMOID,
            normalised=self.norm_topk_prob,
            correction="feed_forward.expert_bias" if self.use_expert_bias else "",
            scale=self.routed_scaling_factor,
            smallest_sum=1e-6,
        )
