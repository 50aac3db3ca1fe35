"""GPT and families in its manner: layer norms with biases, and feed-forward parts without gates. And gpt-oss (2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.settings import (
    ACTIVATIONS,
    FULL,
    NONE,
    QKV,
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
    Fusion,
    HeadNorm,
    LayerRecipe,
    LearnedPositions,
    MlpRecipe,
    ModelRecipe,
    Norm,
    NormKind,
    NormOrder,
    Rotary,
)
from pdserve_kernels.feed_forward import CLAMPED_AT, CLAMPED_SLOPE, Activation, Scoring

GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")


class LayerNormSettings(FamilySettings, kw_only=True):
    """What these families share: layer norms with biases."""

    grouped: ClassVar[bool] = False
    """Whether there may be fewer key heads than query heads."""

    layer_norm_eps: float = 1e-5

    def norm(self) -> Norm:
        return Norm(self.layer_norm_eps, NormKind.LAYER, biased=True)

    def kv_heads(self) -> int:
        return super().kv_heads() if self.grouped else self.num_attention_heads

    def plain_mlp(self, up: str, down: str, biased: bool, channels: int | None = None) -> MlpRecipe:
        """Returns a feed-forward part without a gate."""
        activation = ACTIVATIONS[self.hidden_act]
        biases = frozenset({up, down}) if biased else NONE
        return MlpRecipe(channels or self.intermediate_size, activation, "", up, down, biased=biases)


class Starcoder2Settings(LayerNormSettings, kw_only=True):
    models: ClassVar[str] = "StarCoder 2"
    grouped: ClassVar[bool] = True
    activations: ClassVar[tuple[str, ...]] = GELUS
    vocab_size: Count = 49_152
    hidden_size: Count = 3072
    intermediate_size: Count = 12_288
    num_hidden_layers: Count = 30
    num_attention_heads: Count = 24
    num_key_value_heads: Count | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 4096
    norm_epsilon: float = 1e-5
    eos_token_id: int | list[int] | None = 50_256
    tie_word_embeddings: bool = True
    sliding_window: Count | None = None
    use_bias: bool = True

    def biases(self) -> frozenset[str]:
        return QKVO if self.use_bias else NONE

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers

    def norm(self) -> Norm:
        return Norm(self.norm_epsilon, NormKind.LAYER, biased=True)

    def mlp(self) -> MlpRecipe:
        return self.plain_mlp("mlp.c_fc", "mlp.c_proj", self.use_bias)


class StableLmSettings(LayerNormSettings, kw_only=True):
    """A gated part, unlike its neighbours here. A quarter of each head is turned."""

    models: ClassVar[str] = "StableLM 2, StableLM 3B"
    grouped: ClassVar[bool] = True
    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.25
    vocab_size: Count = 50_304
    hidden_size: Count = 2560
    intermediate_size: Count = 6912
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 4096
    eos_token_id: int | list[int] | None = 0
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    def check(self) -> None:
        super().check()
        if self.qk_layernorm:
            raise ModelError("qk_layernorm, norms with weights for each head, is not supported")

    def biases(self) -> frozenset[str]:
        return QKV if self.use_qkv_bias else NONE

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        if not self.use_parallel_residual:
            return layer
        return replace(layer, norms=("input_layernorm",), order=NormOrder.PARALLEL)


class NemotronSettings(LayerNormSettings, kw_only=True):
    """NVIDIA's Nemotron 4 and Minitron: half of each head is turned, and norms have their weights less one."""

    models: ClassVar[str] = "Nemotron 4, Minitron"
    grouped: ClassVar[bool] = True
    activations: ClassVar[tuple[str, ...]] = ("relu2",)
    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.5
    vocab_size: Count = 256_000
    hidden_size: Count = 6144
    intermediate_size: Count = 24_576
    num_attention_heads: Count = 48
    hidden_act: str = "relu2"
    max_position_embeddings: Count = 4096
    norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 3

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def norm(self) -> Norm:
        return Norm(self.norm_eps, NormKind.LAYER, offset=1.0, biased=True)

    def mlp(self) -> MlpRecipe:
        return self.plain_mlp("mlp.up_proj", "mlp.down_proj", self.mlp_bias)


class Jais2Settings(LayerNormSettings, kw_only=True):
    models: ClassVar[str] = "Jais 2"
    grouped: ClassVar[bool] = True
    activations: ClassVar[tuple[str, ...]] = ("relu2",)
    vocab_size: Count = 150_272
    hidden_size: Count = 3328
    intermediate_size: Count = 26_624
    num_attention_heads: Count = 26
    hidden_act: str = "relu2"
    max_position_embeddings: Count = 8192
    eos_token_id: int | list[int] | None = 150_024
    attention_bias: bool = True
    mlp_bias: bool = True

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def mlp(self) -> MlpRecipe:
        return self.plain_mlp("mlp.up_proj", "mlp.down_proj", self.mlp_bias)


class PersimmonSettings(LayerNormSettings, kw_only=True):
    """Adept's Persimmon: one tensor has each head's query, key and value, and queries and keys are normalised."""

    models: ClassVar[str] = "Persimmon 8B"
    activations: ClassVar[tuple[str, ...]] = ("relu2",)
    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.5
    vocab_size: Count = 262_144
    intermediate_size: Count = 16_384
    num_hidden_layers: Count = 36
    num_attention_heads: Count = 64
    hidden_act: str = "relu2"
    max_position_embeddings: Count = 16_384
    qk_layernorm: bool = True

    def attention(self, index: int) -> AttentionRecipe:
        fused, out = "self_attn.query_key_value", "self_attn.dense"
        norms = HeadNorm(self.norm(), "self_attn.q_layernorm", "self_attn.k_layernorm") if self.qk_layernorm else None
        return AttentionRecipe(
            self.rotary(), out=out, fused=fused, fusion=Fusion.GROUPS, biased=frozenset({fused, out}), norms=norms
        )

    def mlp(self) -> MlpRecipe:
        return self.plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", biased=True)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), last_norm="model.final_layernorm")


class GptNeoXSettings(LayerNormSettings, kw_only=True):
    """EleutherAI's GPT-NeoX and Pythia: a quarter of each head is turned, both parts beside each other."""

    models: ClassVar[str] = "Pythia, GPT-NeoX 20B, Dolly 2"
    activations: ClassVar[tuple[str, ...]] = GELUS
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 50_432
    hidden_size: Count = 6144
    intermediate_size: Count = 24_576
    num_hidden_layers: Count = 44
    num_attention_heads: Count = 64
    hidden_act: str = "gelu"
    attention_bias: bool = True
    use_parallel_residual: bool = True
    rotary_pct: float = 0.25
    rotary_emb_base: float | None = None

    def rotary(self) -> Rotary:
        rotary = super().rotary()
        given = self.rope_parameters is not None and self.rope_parameters.rope_theta is not None
        return rotary if given or self.rotary_emb_base is None else replace(rotary, theta=self.rotary_emb_base)

    def turned_channels(self) -> int | None:
        given = None if self.rope_parameters is None else self.rope_parameters.partial_rotary_factor
        part = self.rotary_pct if given is None else given
        return None if part == 1.0 else int(self.head_size() * part)

    def attention(self, index: int) -> AttentionRecipe:
        fused, out = "attention.query_key_value", "attention.dense"
        biased = frozenset({fused, out}) if self.attention_bias else NONE
        return AttentionRecipe(self.rotary(), out=out, fused=fused, fusion=Fusion.GROUPS, biased=biased)

    def mlp(self) -> MlpRecipe:
        return self.plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", biased=True)

    def layer(self, index: int) -> LayerRecipe:
        order = NormOrder.PARALLEL if self.use_parallel_residual else NormOrder.PRE
        return replace(super().layer(index), order=order)

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            embedding="gpt_neox.embed_in",
            layer_prefix="gpt_neox.layers.",
            last_norm="gpt_neox.final_layer_norm",
            head="embed_out",
        )


class GptSettings(LayerNormSettings, kw_only=True):
    """What families share whose settings have OpenAI's names."""

    activations: ClassVar[tuple[str, ...]] = GELUS
    vocab_size: Count = 50_257
    hidden_size: Count = msgspec.field(default=768, name="n_embd")
    num_hidden_layers: Count = msgspec.field(default=12, name="n_layer")
    num_attention_heads: Count = msgspec.field(default=12, name="n_head")
    max_position_embeddings: Count = msgspec.field(default=1024, name="n_positions")
    intermediate_size: int = 0
    n_inner: Count | None = None
    hidden_act: str = msgspec.field(default="gelu_new", name="activation_function")
    layer_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_epsilon")
    eos_token_id: int | list[int] | None = 50_256
    tie_word_embeddings: bool = True

    def channels(self) -> int:
        return self.n_inner or 4 * self.hidden_size

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(), embedding="transformer.wte", layer_prefix="transformer.h.", last_norm="transformer.ln_f"
        )


class Gpt2Settings(GptSettings, kw_only=True):
    """Learned positions, and weights that are stored the other way round."""

    models: ClassVar[str] = "GPT-2, DistilGPT-2"
    transposed: ClassVar[bool] = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False

    def check(self) -> None:
        super().check()
        if self.add_cross_attention:
            raise ModelError("add_cross_attention, attention to another model, is not supported")

    def left_to_transformers(self) -> bool:
        return self.scale_attn_by_inverse_layer_idx

    def attention_scale(self) -> float:
        return super().attention_scale() if self.scale_attn_weights else 1.0

    def attention(self, index: int) -> AttentionRecipe:
        fused, out = "attn.c_attn", "attn.c_proj"
        return AttentionRecipe(None, out=out, fused=fused, biased=frozenset({fused, out}), transposed=self.transposed)

    def mlp(self) -> MlpRecipe:
        part = self.plain_mlp("mlp.c_fc", "mlp.c_proj", biased=True, channels=self.channels())
        return replace(part, transposed=self.transposed)

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("ln_1", "ln_2"))

    def recipe(self) -> ModelRecipe:
        positions = LearnedPositions("transformer.wpe", self.max_position_embeddings)
        return replace(super().recipe(), positions=positions, unused_ends=(".attn.bias", ".attn.masked_bias"))


class GptBigCodeSettings(Gpt2Settings, kw_only=True):
    """StarCoder 1 and SantaCoder: one key head for all query heads."""

    models: ClassVar[str] = "StarCoder 1, SantaCoder"
    transposed: ClassVar[bool] = False
    hidden_act: str = msgspec.field(default="gelu_pytorch_tanh", name="activation_function")
    multi_query: bool = True

    def kv_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads

    def attention(self, index: int) -> AttentionRecipe:
        fusion = Fusion.PARTS if self.multi_query else Fusion.GROUPS
        return replace(super().attention(index), fusion=fusion)


class GptJSettings(GptSettings, kw_only=True):
    """Part of each head is turned, neighbour by neighbour, and both parts stand beside each other."""

    models: ClassVar[str] = "GPT-J 6B"
    interleaved: ClassVar[bool] = True
    vocab_size: Count = 50_400
    hidden_size: Count = msgspec.field(default=4096, name="n_embd")
    num_hidden_layers: Count = msgspec.field(default=28, name="n_layer")
    num_attention_heads: Count = msgspec.field(default=16, name="n_head")
    max_position_embeddings: Count = msgspec.field(default=2048, name="n_positions")
    rotary_dim: Count | None = 64
    tie_word_embeddings: bool = False

    def turned_channels(self) -> int | None:
        return self.rotary_dim

    def attention(self, index: int) -> AttentionRecipe:
        query, key, value, out = (f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
        return AttentionRecipe(self.rotary(), query=query, key=key, value=value, out=out)

    def mlp(self) -> MlpRecipe:
        return self.plain_mlp("mlp.fc_in", "mlp.fc_out", biased=True, channels=self.channels())

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("ln_1",), order=NormOrder.PARALLEL)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), head_biased=True, unused_ends=(".attn.bias", ".attn.masked_bias"))


class OptSettings(LayerNormSettings, kw_only=True):
    """Meta's OPT: learned positions, of which the first has row 2."""

    models: ClassVar[str] = "OPT"
    activations: ClassVar[tuple[str, ...]] = ("relu", *GELUS)
    vocab_size: Count = 50_272
    hidden_size: Count = 768
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 12
    intermediate_size: Count = msgspec.field(default=3072, name="ffn_dim")
    hidden_act: str = msgspec.field(default="relu", name="activation_function")
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = None
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    def left_to_transformers(self) -> bool:
        usual = self.do_layer_norm_before and self.layer_norm_elementwise_affine and not self.remove_final_layer_norm
        return not usual or self.word_embed_proj_dim not in (None, self.hidden_size)

    def attention(self, index: int) -> AttentionRecipe:
        out = "self_attn.out_proj"
        return AttentionRecipe(None, out=out, biased=QKV | {out} if self.enable_bias else NONE)

    def mlp(self) -> MlpRecipe:
        return self.plain_mlp("fc1", "fc2", self.enable_bias)

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("self_attn_layer_norm", "final_layer_norm"))

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            embedding="model.decoder.embed_tokens",
            positions=LearnedPositions("model.decoder.embed_positions", self.max_position_embeddings + 2, 2),
            layer_prefix="model.decoder.layers.",
            last_norm="model.decoder.final_layer_norm",
        )


class FalconSettings(LayerNormSettings, kw_only=True):
    """TII's Falcon: one tensor for queries, keys and values, in three arrangements."""

    models: ClassVar[str] = "Falcon 7B, 40B, 180B, Falcon 2"
    vocab_size: Count = 65_024
    hidden_size: Count = 4544
    intermediate_size: int = 0
    num_attention_heads: Count = 71
    layer_norm_epsilon: float = 1e-5
    eos_token_id: int | list[int] | None = 11
    tie_word_embeddings: bool = True
    num_kv_heads: Count | None = None
    num_ln_in_parallel_attn: int | None = None
    alibi: bool = False
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    bias: bool = False
    ffn_hidden_size: Count | None = None
    activation: str = "gelu"

    def check(self) -> None:
        super().check()
        if self.alibi:
            raise ModelError("alibi, scores that fall with distance, is not supported")
        if self.activation != "gelu":
            raise ModelError(f"activation {self.activation!r} is not supported; supported: 'gelu'")
        if self.new_decoder_architecture and not self.parallel_attn:
            raise ModelError("new_decoder_architecture without parallel_attn is not supported")

    def channels(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    def kv_heads(self) -> int:
        if self.new_decoder_architecture:
            return self.num_kv_heads or self.num_attention_heads
        return 1 if self.multi_query else self.num_attention_heads

    def norm(self) -> Norm:
        return Norm(self.layer_norm_epsilon, NormKind.LAYER, biased=True)

    def attention(self, index: int) -> AttentionRecipe:
        fused, out = "self_attention.query_key_value", "self_attention.dense"
        parts = self.multi_query and not self.new_decoder_architecture
        return AttentionRecipe(
            self.rotary(),
            out=out,
            fused=fused,
            fusion=Fusion.PARTS if parts else Fusion.GROUPS,
            biased=frozenset({fused, out}) if self.bias else NONE,
        )

    def mlp(self) -> MlpRecipe:
        up, down = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
        biased = frozenset({up, down}) if self.bias else NONE
        return MlpRecipe(self.channels(), Activation.GELU, "", up, down, biased=biased)

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        if not self.parallel_attn:
            return layer
        two = self.new_decoder_architecture and self.num_ln_in_parallel_attn in (None, 2)
        return replace(layer, norms=("ln_attn", "ln_mlp") if two else ("input_layernorm",), order=NormOrder.PARALLEL)

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            embedding="transformer.word_embeddings",
            layer_prefix="transformer.h.",
            last_norm="transformer.ln_f",
        )


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
