"""OLMo 1 to 3, Hybrid and OLMoE: norms without weights, behind each part, and over all heads together."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import ClassVar

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.qwen import DeltaNetSettings
from pdserve.models.families.settings import (
    FULL,
    HEAD_NORMS,
    LINEAR,
    NONE,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    gated_expert,
    renamed_in_layers,
    rotary_of,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    DeltaNetRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadNorm,
    LayerRecipe,
    ModelRecipe,
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


class HybridRotary(RotarySettings, kw_only=True):
    """``rope_parameters`` of an OLMo Hybrid: a base that is null is not one that is left out."""

    rope_theta: float | msgspec.UnsetType | None = msgspec.UNSET  # type: ignore[assignment]


class OlmoHybridSettings(DeltaNetSettings, kw_only=True):
    """Delta nets in most layers, with norms before each part, and OLMo 2's attention in the others.

    No layer knows positions if the base of the frequencies is null, as it is in the released files.
    """

    models: ClassVar[str] = "OLMo Hybrid 7B"
    partly_turned: ClassVar[bool] = False
    turned_part: ClassVar[float] = 1.0
    inner: ClassVar[tuple[str, ...]] = tuple(f"linear_attn.{name}_proj" for name in "qkvgba")
    vocab_size: Count = 100_352
    hidden_size: Count = 3840
    num_attention_heads: Count = 30
    head_dim: Count | None = None
    max_position_embeddings: Count = 65_536
    eos_token_id: int | list[int] | None = 100_257
    rope_theta: float | msgspec.UnsetType | None = msgspec.UNSET  # type: ignore[assignment]
    rope_parameters: HybridRotary | None = None
    linear_num_key_heads: Count | None = None  # type: ignore[assignment]  # as many as heads unless a file says it
    linear_num_value_heads: Count | None = None  # type: ignore[assignment]  # as well
    linear_key_head_dim: Count | None = None  # type: ignore[assignment]  # three quarters of a head's share
    linear_value_head_dim: Count | None = None  # type: ignore[assignment]  # twice as many
    linear_allow_neg_eigval: bool = True

    def __post_init__(self) -> None:
        if self.rope_theta is msgspec.UNSET:
            self.rope_theta = self.default_theta
        given = self.rope_parameters
        if given is not None:
            self.rope_theta = self.rope_theta if given.rope_theta is msgspec.UNSET else given.rope_theta
            self.rope_parameters = msgspec.structs.replace(given, rope_theta=self.rope_theta)
        heads = self.num_attention_heads
        self.linear_num_key_heads = self.linear_num_key_heads or heads
        self.linear_num_value_heads = self.linear_num_value_heads or heads
        self.linear_key_head_dim = self.linear_key_head_dim or int(0.75 * self.hidden_size / self.linear_num_key_heads)
        self.linear_value_head_dim = self.linear_value_head_dim or 2 * self.linear_key_head_dim

    def check(self) -> None:
        super().check()
        if len(set(self.kinds())) == 1:
            raise ModelError(f"layer_types of an OLMo Hybrid must have both {FULL!r} and {LINEAR!r}")

    def kinds(self) -> list[str]:
        usual = super().kinds()
        # A small model has one layer that sees all, too.
        return usual if self.layer_types is not None or FULL in usual else [*usual[:-1], FULL]

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def norm(self) -> Norm:
        return FamilySettings.norm(self)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return None if self.rope_theta is None else self.rotary()

    def attention(self, index: int) -> AttentionRecipe:
        return replace(FamilySettings.attention(self, index), norms=HeadNorm(self.norm(), *HEAD_NORMS, NormScope.ALL))

    def delta_net(self) -> DeltaNetRecipe:
        return replace(
            super().delta_net(),
            norm=Norm(1e-5),
            convs=tuple(f"linear_attn.{name}_conv1d" for name in "qkv"),
            gated_norm="linear_attn.o_norm",
            out="linear_attn.o_proj",
            beta_scale=2.0 if self.linear_allow_neg_eigval else 1.0,
        )

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        return layer if layer.attention is None else replace(layer, norms=NORMS_BEHIND, order=NormOrder.POST)

    def recipe(self) -> ModelRecipe:
        # The names of norms in released files, which transformers also writes for layers with attention.
        names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
        renamed = (renamed_in_layers(self.num_hidden_layers, *each) for each in names.items())
        return replace(super().recipe(), renamed=tuple(chain.from_iterable(renamed)), draft=None)


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
