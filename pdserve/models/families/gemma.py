"""Gemma 1, and Gemma 2 and 3 (Gemma Team, 2024 and 2025) with windows in many layers and four norms in each.

The weights of their norms are stored less one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.settings import (
    FULL,
    NONE,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    rotary_of,
    windows_of,
)
from pdserve.models.recipe import LayerRecipe, MlpRecipe, ModelRecipe, Norm, NormOrder, Rotary
from pdserve_kernels.activations import Activation

FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class GemmaSettings(FamilySettings, kw_only=True):
    """Gemma 1."""

    models: ClassVar[str] = "Gemma 1, CodeGemma"
    activations: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)
    vocab_size: Count = 256_000
    hidden_size: Count = 3072
    intermediate_size: Count = 24_576
    num_hidden_layers: Count = 28
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 16
    head_dim: Count | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    use_bidirectional_attention: bool | None = None

    def check(self) -> None:
        super().check()
        if self.use_bidirectional_attention:
            raise ModelError("use_bidirectional_attention of a Gemma is not supported")

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps, offset=1.0)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), embedding_scale=self.hidden_size**0.5)


class Gemma2Settings(FamilySettings, kw_only=True):
    """Every second layer sees everything, the others a window. Scores and logits are bounded."""

    models: ClassVar[str] = "Gemma 2"
    vocab_size: Count = 256_000
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    query_pre_attn_scalar: Count = 256
    sliding_window: Count | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | None = None

    def check(self) -> None:
        self._check_shared()
        if self.hidden_activation != "gelu_pytorch_tanh":
            raise ModelError(
                f"hidden_activation {self.hidden_activation!r} is not supported; only 'gelu_pytorch_tanh' is"
            )
        if self.use_bidirectional_attention:
            raise ModelError("use_bidirectional_attention of a Gemma is not supported")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (bound := getattr(self, name)) is not None and bound < 0:
                raise ModelError(f"{name} is {bound}; a bound has to be above 0, and 0 is none")

    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    def attention_cap(self) -> float | None:
        return self.attn_logit_softcapping or None

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def full_every(self) -> int:
        """Returns of how many layers the last one sees everything."""
        return 2

    def windows(self) -> tuple[int | None, ...]:
        numbers = range(1, self.num_hidden_layers + 1)
        usual = [SLIDING if number % self.full_every() else FULL for number in numbers]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps, offset=1.0)

    def mlp(self) -> MlpRecipe:
        return MlpRecipe(self.intermediate_size, Activation.GELU_TANH)

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=FOUR_NORMS, order=NormOrder.SANDWICH)

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(), embedding_scale=self.hidden_size**0.5, logits_cap=self.final_logit_softcapping or None
        )


class VaultGemmaSettings(Gemma2Settings, kw_only=True):
    """Gemma 2 without norms behind its parts."""

    models: ClassVar[str] = "VaultGemma"

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=FOUR_NORMS[::2], order=NormOrder.PRE)


class Gemma3Settings(Gemma2Settings, kw_only=True):
    """Every sixth layer sees everything, the others see a window and turn faster."""

    models: ClassVar[str] = "Gemma 3"
    head_norms: ClassVar[bool] = True
    vocab_size: Count = 262_208
    max_position_embeddings: Count = 131_072
    sliding_window_pattern: Count = 6
    rope_local_base_freq: float = 10_000.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def check(self) -> None:
        super().check()
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, name):
                raise ModelError(f"{name} of a Gemma 3 is not supported")
        both = self.rope_parameters
        given = (self.rope_scaling, both) + ((both.full_attention, both.sliding_attention) if both else ())
        if any(own is not None and not own.truncate for own in given):
            # transformers reads it beside the settings of the kinds of layers, and not within them.
            raise ModelError("truncate: false in the rotary settings of a Gemma 3 is not supported")

    def full_every(self) -> int:
        return self.sliding_window_pattern

    def rotary(self) -> Rotary:
        both = self.rope_parameters
        own = (RotarySettings(rope_type="default") if both is None else both.full_attention) or RotarySettings()
        if self.rope_scaling is not None:
            given = msgspec.structs.asdict(self.rope_scaling)
            own = msgspec.structs.replace(own, **{name: value for name, value in given.items() if value is not None})
        return rotary_of(own, 1_000_000.0 if self.rope_theta is None else self.rope_theta, self.max_position_embeddings)

    def window_rotary(self) -> Rotary:
        own = None if self.rope_parameters is None else self.rope_parameters.sliding_attention
        return rotary_of(own or RotarySettings(), self.rope_local_base_freq, self.max_position_embeddings)

    def rotary_of_layer(self, index: int) -> Rotary:
        return self.rotary() if self.windows()[index] is None else self.window_rotary()
