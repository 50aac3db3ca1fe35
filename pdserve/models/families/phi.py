"""Microsoft's Phi 1 to 4."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.settings import ACTIVATIONS, Count, FamilySettings
from pdserve.models.recipe import (
    AttentionRecipe,
    HeadNorm,
    LayerRecipe,
    MlpRecipe,
    ModelRecipe,
    Norm,
    NormKind,
    NormOrder,
)

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense")
INNER = ("mlp.fc1", "mlp.fc2")


class PhiSettings(FamilySettings, kw_only=True):
    """Phi 1, 1.5 and 2: attention and feed-forward part beside each other, biases everywhere."""

    models: ClassVar[str] = "Phi 1, 1.5, 2"
    activations: ClassVar[tuple[str, ...]] = ("gelu_new", "gelu", "gelu_pytorch_tanh")
    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.5
    vocab_size: Count = 51_200
    hidden_size: Count = 2048
    intermediate_size: Count = 8192
    num_hidden_layers: Count = 24
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False

    def norm(self) -> Norm:
        return Norm(self.layer_norm_eps, NormKind.LAYER, biased=True)

    def attention(self, index: int) -> AttentionRecipe:
        names = ("self_attn.q_layernorm", "self_attn.k_layernorm")
        norms = HeadNorm(self.norm(), *names) if self.qk_layernorm else None
        return replace(super().attention(index), out=ATTENTION[3], biased=frozenset(ATTENTION), norms=norms)

    def mlp(self) -> MlpRecipe:
        activation = ACTIVATIONS[self.hidden_act]
        return MlpRecipe(self.intermediate_size, activation, "", *INNER, biased=frozenset(INNER))

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("input_layernorm",), order=NormOrder.PARALLEL)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), last_norm="model.final_layernorm", head_biased=True)


class Phi3Settings(FamilySettings, kw_only=True):
    """Phi 3, 3.5, 4 and 4 mini: fused projections, and long contexts with two lists of frequencies."""

    models: ClassVar[str] = "Phi 3, 3.5, 4, 4 mini"
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 32_064
    hidden_size: Count = 3072
    intermediate_size: Count = 8192
    max_position_embeddings: Count = 4096
    original_max_position_embeddings: Count | None = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 32_000
    sliding_window: Count | None = None

    def biases(self) -> frozenset[str]:
        return frozenset()

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), fused="self_attn.qkv_proj")

    def mlp(self) -> MlpRecipe:
        return replace(super().mlp(), fused="mlp.gate_up_proj")
