"""Llama, Mixtral and Llama 4, and families that differ from one of these in little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.deepseek import DENSE, SPARSE, check_kinds
from pdserve.models.families.settings import (
    FULL,
    HEAD_NORMS,
    LINEAR,
    MLP,
    NONE,
    QKV,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    check_experts,
    check_layer_types,
    gated,
    gated_expert,
    growing,
    in_one_tensor,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadBlockIndex,
    HeadBlocksRecipe,
    HeadNorm,
    LayerRecipe,
    LightningRecipe,
    MlpRecipe,
    ModelRecipe,
    Norm,
    NormOrder,
    NormScope,
    PartScales,
    QueryScale,
    Rotary,
)
from pdserve_kernels.feed_forward import CLAMPED_AT, CLAMPED_SLOPE, Activation, Scoring


class LlamaSettings(FamilySettings, kw_only=True):
    """Llama 1 to 3, SmolLM 2 and many others."""

    models: ClassVar[str] = "Llama 2 and 3, SmolLM 2, Yi, DeepSeek R1's distilled Llamas"


class MllamaTextSettings(LlamaSettings, kw_only=True):
    """The text part of a Llama 3.2 Vision. A text passes by the layers that attend to images."""

    models: ClassVar[str] = "Llama 3.2 Vision"
    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Count = 128_256
    intermediate_size: Count = 14_336
    num_hidden_layers: Count = 40
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 128_001
    cross_attention_layers: list[int] | None = None

    def of_images(self) -> list[int]:
        """Returns the layers that attend to images."""
        given = range(3, 40, 5) if self.cross_attention_layers is None else self.cross_attention_layers
        return sorted({*given} & {*range(self.num_hidden_layers)})

    def layer(self, index: int) -> LayerRecipe:
        return LayerRecipe(None, None, self.norm(), ()) if index in self.of_images() else super().layer(index)

    def recipe(self) -> ModelRecipe:
        recipe = super().recipe()
        unused = tuple(f"{recipe.layer_prefix}{index}." for index in self.of_images())
        return replace(recipe, unused=unused, image_tokens=8)


class MistralSettings(FamilySettings, kw_only=True):
    """Every layer sees a window."""

    models: ClassVar[str] = "Mistral 7B, Nemo, Small"
    intermediate_size: Count = 14_336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    sliding_window: Count | None = 4096

    def biases(self) -> frozenset[str]:
        return NONE

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers


class MinistralSettings(MistralSettings, kw_only=True):
    """Some layers see a window."""

    models: ClassVar[str] = "Ministral 8B"
    layer_types: list[str] | None = None

    def windows(self) -> tuple[int | None, ...]:
        usual = [FULL if self.sliding_window is None else SLIDING] * self.num_hidden_layers
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)


class Ministral3Settings(MistralSettings, kw_only=True):
    """Queries grow with their positions, and no layer sees a window unless the file says so."""

    models: ClassVar[str] = "Ministral 3"
    vocab_size: Count = 131_072
    num_hidden_layers: Count = 34
    head_dim: Count | None = 128
    max_position_embeddings: Count = 262_144
    rms_norm_eps: float = 1e-5
    rope_parameters: RotarySettings | None = msgspec.field(
        default_factory=lambda: RotarySettings(
            rope_type="yarn",
            rope_theta=1_000_000.0,
            factor=16.0,
            original_max_position_embeddings=16_384,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        )
    )
    sliding_window: Count | None = None

    def attention(self, index: int) -> AttentionRecipe:
        given = self.rope_scaling or self.rope_parameters or RotarySettings()
        return replace(super().attention(index), query_scale=growing(given))


class CwmSettings(FamilySettings, kw_only=True):
    """One layer in four sees everything, the others a window."""

    models: ClassVar[str] = "Code World Model 32B"

    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Count = 128_256
    hidden_size: Count = 6144
    intermediate_size: Count = 21_504
    num_hidden_layers: Count = 64
    num_attention_heads: Count = 48
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = msgspec.field(default_factory=lambda: [128_001, 128_008, 128_009])
    sliding_window: Count | None = 8192
    layer_types: list[str] | None = None

    def biases(self) -> frozenset[str]:
        return MLP if self.mlp_bias else NONE

    def windows(self) -> tuple[int | None, ...]:
        usual = [SLIDING if i % 4 else FULL for i in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)


class SmolLm3Settings(FamilySettings, kw_only=True):
    """Every fourth layer does not know positions."""

    models: ClassVar[str] = "SmolLM 3"

    default_theta: ClassVar[float] = 2_000_000.0
    vocab_size: Count = 128_256
    hidden_size: Count = 2048
    num_hidden_layers: Count = 36
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32_768
    eos_token_id: int | list[int] | None = 128_001
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: Count | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    layer_types: list[str] | None = None

    def _turned(self) -> list[bool]:
        """Returns whether each layer knows positions."""
        if self.no_rope_layers is not None:
            if len(self.no_rope_layers) != self.num_hidden_layers:
                raise ModelError(f"no_rope_layers must have a number for each of {self.num_hidden_layers} layers")
            return [bool(turned) for turned in self.no_rope_layers]
        return [(index + 1) % self.no_rope_layer_interval != 0 for index in range(self.num_hidden_layers)]

    def windows(self) -> tuple[int | None, ...]:
        # Kinds that a file names hold whatever use_sliding_window says, as they do in transformers.
        windowed = self.use_sliding_window and self.sliding_window is not None
        usual = [SLIDING if windowed and not turned else FULL for turned in self._turned()]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary() if self._turned()[index] else None


class SeedOssSettings(FamilySettings, kw_only=True):
    """ByteDance's Seed-OSS: biases of queries, keys and values, and of the outputs if the file says so."""

    models: ClassVar[str] = "Seed-OSS 36B"
    vocab_size: Count = 155_136
    intermediate_size: Count = 27_648
    num_hidden_layers: Count = 64
    num_attention_heads: Count = 80
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 524_288
    attention_bias: bool = True
    attention_out_bias: bool = False

    def biases(self) -> frozenset[str]:
        inputs, outputs = QKV if self.attention_bias else NONE, QKVO - QKV if self.attention_out_bias else NONE
        return inputs | outputs | (MLP if self.mlp_bias else NONE)


class ArceeSettings(FamilySettings, kw_only=True):
    """A feed-forward part without a gate."""

    models: ClassVar[str] = "AFM 4.5B"
    activations: ClassVar[tuple[str, ...]] = ("relu2",)
    hidden_size: Count = 2560
    intermediate_size: Count = 18_432
    hidden_act: str = "relu2"
    max_position_embeddings: Count = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 128_001

    def mlp(self) -> MlpRecipe:
        return replace(super().mlp(), gate="")


class HeliumSettings(FamilySettings, kw_only=True):
    """Neighbouring channels are turned against each other."""

    models: ClassVar[str] = "Helium 1"

    default_theta: ClassVar[float] = 100_000.0
    interleaved: ClassVar[bool] = True
    vocab_size: Count = 48_000
    hidden_size: Count = 2560
    intermediate_size: Count = 7040
    num_hidden_layers: Count = 24
    num_attention_heads: Count = 20
    num_key_value_heads: Count | None = 20
    head_dim: Count | None = 128
    max_position_embeddings: Count = 4096
    rms_norm_eps: float = 1e-8

    def biases(self) -> frozenset[str]:
        return (QKV if self.attention_bias else NONE) | (MLP if self.mlp_bias else NONE)


class InternLm3Settings(FamilySettings, kw_only=True):
    models: ClassVar[str] = "InternLM 3 8B"
    vocab_size: Count = 128_512
    intermediate_size: Count = 10_240
    num_hidden_layers: Count = 48
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    max_position_embeddings: Count = 32_768
    rms_norm_eps: float = 1e-5
    qkv_bias: bool | None = None
    """What older files call ``attention_bias``."""
    bias: bool | None = None
    """What older files call ``mlp_bias``."""

    def biases(self) -> frozenset[str]:
        inputs = self.attention_bias if self.qkv_bias is None else self.qkv_bias
        others = self.mlp_bias if self.bias is None else self.bias
        return (QKV if inputs else NONE) | ((QKVO - QKV) | MLP if others else NONE)


class GraniteSettings(FamilySettings, kw_only=True):
    """IBM's Granite 3: embedding, residuals, scores and logits have factors."""

    models: ClassVar[str] = "Granite 3"
    attention_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def attention_scale(self) -> float:
        return self.attention_multiplier

    def recipe(self) -> ModelRecipe:
        recipe = super().recipe()
        layers = tuple(replace(layer, residual_scale=self.residual_multiplier) for layer in recipe.layers)
        return replace(
            recipe, layers=layers, embedding_scale=self.embedding_multiplier, logits_scale=1 / self.logits_scaling
        )


class GraniteMoeSettings(GraniteSettings, kw_only=True):
    """Granite 3 with experts, of which one tensor holds all of a layer."""

    models: ClassVar[str] = "Granite 3 MoE"
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = "block_sparse_moe"
        expert = MlpRecipe(self.intermediate_size, fused=f"{part}.input_linear.{{}}", down=f"{part}.output_linear.{{}}")
        names = (f"{part}.input_linear", f"{part}.output_linear")
        return ExpertsRecipe(
            self.num_local_experts,
            self.num_experts_per_tok,
            expert,
            stacked=tuple((f"{name}.weight", f"{name}.{{}}.weight") for name in names),
            router=f"{part}.router.layer",
            scoring=Scoring.SOFTMAX_OF_CHOSEN,
        )


class GraniteMoeSharedSettings(GraniteMoeSettings, kw_only=True):
    """One more expert sees every token, if it has channels."""

    models: ClassVar[str] = "Granite 3 MoE with shared experts"
    shared_intermediate_size: int = 0

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        if not self.shared_intermediate_size or not isinstance(part, ExpertsRecipe):
            return part
        channels = self.shared_intermediate_size
        shared = MlpRecipe(channels, fused="shared_mlp.input_linear", down="shared_mlp.output_linear")
        return replace(part, shared=shared)


class GraniteMoeSwaSettings(GraniteMoeSharedSettings, kw_only=True):
    """Three layers in four see a window, all have sinks, and each may have a base of frequencies of its own."""

    models: ClassVar[str] = "Granite Swash 3B A600M"
    sliding_window: Count | None = 128
    layer_types: list[str] | None = None
    layer_rope_theta: list[float] | None = None
    """0 for a layer that does not know positions."""

    def check(self) -> None:
        super().check()
        if self.layer_rope_theta is not None and len(self.layer_rope_theta) != self.num_hidden_layers:
            raise ModelError(f"layer_rope_theta must have a number for each of {self.num_hidden_layers} layers")

    def windows(self) -> tuple[int | None, ...]:
        usual = [SLIDING if index % 4 else FULL for index in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        if self.layer_rope_theta is None:
            return self.rotary()
        theta = self.layer_rope_theta[index]
        return replace(self.rotary(), theta=theta) if theta else None

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), sinks="self_attn.sinks")

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        assert isinstance(part, ExpertsRecipe)
        return replace(in_one_tensor(part, "block_sparse_moe.experts"), router="block_sparse_moe.router")


class GraniteSwaSettings(GraniteMoeSwaSettings, kw_only=True):
    """The same without experts."""

    models: ClassVar[str] = "Granite Swash 2B"
    vocab_size: Count = 100_352
    hidden_size: Count = 2560
    intermediate_size: Count = 8192
    num_hidden_layers: Count = 24
    num_attention_heads: Count = 20
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 8192
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 100_257
    tie_word_embeddings: bool = True

    def biases(self) -> frozenset[str]:
        return FamilySettings.biases(self)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return self.mlp()


class HyperClovaXSettings(GraniteSettings, kw_only=True):
    """NAVER's HyperCLOVA X SEED: Granite's factors, and more norms behind each part if the file says so."""

    models: ClassVar[str] = "HyperCLOVA X SEED"
    use_post_norm: bool = True
    attention_multiplier: float | None = None  # type: ignore[assignment]  # the usual factor if the file has none

    def attention_scale(self) -> float:
        usual = float(self.head_size() ** -0.5)
        return usual if self.attention_multiplier is None else self.attention_multiplier

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        if not self.use_post_norm:
            return layer
        norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
        return replace(layer, norms=norms, order=NormOrder.SANDWICH)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), logits_scale=self.logits_scaling)


class IQuestCoderSettings(LlamaSettings, kw_only=True):
    """A Llama by another name."""

    models: ClassVar[str] = "IQuest Coder 40B"
    vocab_size: Count = 76_800
    hidden_size: Count = 5120
    intermediate_size: Count = 27_648
    num_hidden_layers: Count = 80
    num_attention_heads: Count = 40
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    clip_qkv: float | None = None
    use_sliding_window: bool = False

    def check(self) -> None:
        super().check()
        if self.clip_qkv is not None or self.use_sliding_window:
            raise ModelError("clip_qkv and use_sliding_window of an IQuest Coder are not supported")


class ApertusSettings(FamilySettings, kw_only=True):
    """The Swiss AI Initiative's Apertus: an activation with weights of its own."""

    models: ClassVar[str] = "Apertus 8B, 70B"
    activations: ClassVar[tuple[str, ...]] = ("xielu",)
    head_norms: ClassVar[bool] = True
    default_theta: ClassVar[float] = 12_000_000.0
    vocab_size: Count = 131_072
    intermediate_size: Count = 14_336
    hidden_act: str = "xielu"
    max_position_embeddings: Count = 65_536
    rms_norm_eps: float = 1e-5

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def mlp(self) -> MlpRecipe:
        return MlpRecipe(self.intermediate_size, Activation.XIELU, "")

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("attention_layernorm", "feedforward_layernorm"))


class NanoChatSettings(FamilySettings, kw_only=True):
    """Karpathy's nanochat: norms without weights, also of the embedding and of rotated heads, and bounded logits."""

    models: ClassVar[str] = "nanochat d20, d32"
    activations: ClassVar[tuple[str, ...]] = ("relu2",)
    vocab_size: Count = 50_304
    hidden_size: Count = 768
    intermediate_size: Count = 8192
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 6
    hidden_act: str = "relu2"
    eos_token_id: int | list[int] | None = 1
    final_logit_softcapping: float | None = 15.0

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps, weighted=False)

    def rotary(self) -> Rotary:
        return replace(super().rotary(), backwards=True)

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS, after_rotary=True))

    def mlp(self) -> MlpRecipe:
        return MlpRecipe(self.intermediate_size, Activation.RELU_SQUARED, "", "mlp.fc1", "mlp.fc2")

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), embedding_norm=self.norm(), logits_cap=self.final_logit_softcapping)


MIXTRAL_EXPERT = ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2")
MIXTRAL_ROUTER = "block_sparse_moe.gate"


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
        gate, up, down = MIXTRAL_EXPERT
        expert = MlpRecipe(self.intermediate_size, gate=gate, up=up, down=down)
        return ExpertsRecipe(self.num_local_experts, self.num_experts_per_tok, expert, MIXTRAL_ROUTER, normalised=True)


class MiniMaxSettings(MixtralSettings, kw_only=True):
    """Lightning attention in every second layer. What a norm gives is the residual, which has factors."""

    models: ClassVar[str] = "MiniMax Text 01, M1"
    layer_types: list[str] | None = None
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0
    block_size: int = 256
    """How many tokens transformers computes at once in a lightning attention."""

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts_per_tok, self.num_local_experts)
        check_layer_types(self.kinds(), self.num_hidden_layers, FULL, LINEAR)

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        usual = [LINEAR if index % 2 else FULL for index in range(self.num_hidden_layers)]
        return usual if self.layer_types is None else self.layer_types

    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.sliding_window if kind == FULL else None for kind in self.kinds())

    def lightning(self, index: int) -> LightningRecipe:
        heads = self.num_attention_heads
        factor = 1 - index / (self.num_hidden_layers - 1 + 1e-5) + 1e-5
        slopes = (2 ** (-8 / heads * (head + 1)) * factor for head in range(heads))
        return LightningRecipe(tuple(slopes), self.head_size(), Norm(1e-6))

    def layer(self, index: int) -> LayerRecipe:
        layer, full = super().layer(index), self.kinds()[index] == FULL
        scales = PartScales(
            attention_out=self.full_attn_beta_factor,
            mixer_out=self.linear_attn_beta_factor,
            feed_forward_out=self.mlp_beta_factor,
            mixing_residual=self.full_attn_alpha_factor if full else self.linear_attn_alpha_factor,
            feeding_residual=self.mlp_alpha_factor,
        )
        layer = replace(layer, order=NormOrder.NORMED, scales=scales)
        return layer if full else replace(layer, attention=None, mixer=self.lightning(index))

    def recipe(self) -> ModelRecipe:
        computed = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        return replace(super().recipe(), unused_ends=tuple(f".self_attn.{name}" for name in computed))


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


class SparseSettings(msgspec.Struct):
    """The object ``sparse_attention_config`` of a MiniMax M3."""

    sparse_num_index_heads: Count | None = None
    sparse_index_dim: Count | None = None
    sparse_block_size: Count | None = None
    sparse_topk_blocks: Count | None = None
    sparse_local_block: int | None = None
    sparse_attention_freq: list[int] | None = None


BLOCKS = "minimax_m3_sparse"


class MiniMaxM3Settings(MiniMaxM2Settings, kw_only=True):
    """Most layers attend to blocks that index heads choose. Experts are those of MiniMax M2, beside a shared one."""

    models: ClassVar[str] = "MiniMax M3"
    activations: ClassVar[tuple[str, ...]] = ("silu", "swigluoai")
    hidden_size: Count = 6144
    intermediate_size: Count = 3072
    num_hidden_layers: Count = 60
    num_attention_heads: Count = 64
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 524_288
    num_local_experts: Count = 128
    num_experts: Count | None = None
    num_experts_per_tok: Count = 4
    dense_intermediate_size: Count = 12_288
    shared_intermediate_size: Count = 3072
    routed_scaling_factor: float = 2.0
    swiglu_alpha: float = CLAMPED_SLOPE
    swiglu_limit: float = CLAMPED_AT
    mlp_layer_types: list[str] | None = None
    moe_layer_freq: list[int] | None = None
    layer_types: list[str] | None = None
    index_n_heads: Count = 4
    index_head_dim: Count = 128
    index_block_size: Count = 128
    index_topk_blocks: Count = 16
    index_local_blocks: int = 1
    sparse_attention_config: SparseSettings | None = None

    def __post_init__(self) -> None:
        own = self.sparse_attention_config or SparseSettings()
        self.index_n_heads = own.sparse_num_index_heads or self.index_n_heads
        self.index_head_dim = own.sparse_index_dim or self.index_head_dim
        self.index_block_size = own.sparse_block_size or self.index_block_size
        self.index_topk_blocks = own.sparse_topk_blocks or self.index_topk_blocks
        if own.sparse_local_block is not None:
            self.index_local_blocks = own.sparse_local_block
        self.num_local_experts = self.num_experts or self.num_local_experts

    def check(self) -> None:
        super().check()
        count, turned = self.num_hidden_layers, self.turned_channels() or self.width()
        check_layer_types(self.layers(), count, FULL, BLOCKS)
        check_kinds(self.kinds(), count)
        check_experts(self.num_experts_per_tok, self.num_local_experts)
        if (self.swiglu_alpha, self.swiglu_limit) != (CLAMPED_SLOPE, CLAMPED_AT):
            raise ModelError(
                f"swiglu_alpha {self.swiglu_alpha} and swiglu_limit {self.swiglu_limit} are not supported; "
                f"{CLAMPED_SLOPE} and {CLAMPED_AT} are"
            )
        if self.rotary_dim not in (None, turned):
            # transformers reads partial_rotary_factor alone. Where the two differ, one of them is wrong.
            raise ModelError(f"rotary_dim {self.rotary_dim} is not the {turned} channels of partial_rotary_factor")
        if BLOCKS not in self.layers():
            return
        if self.index_n_heads != self.kv_heads():
            raise ModelError(f"index_n_heads {self.index_n_heads} has to be the number of KV heads, {self.kv_heads()}")
        if not 0 < self.index_local_blocks <= self.index_topk_blocks:
            raise ModelError(
                f"index_local_blocks {self.index_local_blocks} has to be 1 or more, up to index_topk_blocks"
            )
        if self.index_head_dim % 4 or self.index_head_dim < turned:
            raise ModelError(
                f"index heads of {self.index_head_dim} channels are not supported, of which {turned} are turned; their "
                "number has to be a multiple of 4"
            )

    def layers(self) -> list[str]:
        """Returns the kind of each layer's attention."""
        own = self.sparse_attention_config
        if self.layer_types is not None:
            return self.layer_types
        if own is not None and own.sparse_attention_freq is not None:
            return [BLOCKS if each else FULL for each in own.sparse_attention_freq]
        return [FULL] * self.num_hidden_layers

    def kinds(self) -> list[str]:
        """Returns for each layer whether its feed-forward part is one, or of experts."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        if self.moe_layer_freq is not None:
            return [SPARSE if each else DENSE for each in self.moe_layer_freq]
        return [SPARSE] * self.num_hidden_layers

    def width(self) -> int:
        """Returns the channels of a head, without those of the index key behind it."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def head_size(self) -> int:
        return self.width() + (self.index_head_dim // 2 if BLOCKS in self.layers() else 0)

    def turned_channels(self) -> int | None:
        given = self.scaling().partial_rotary_factor
        factor = self.partial_rotary_factor if given is None else given
        return None if factor in (None, 1.0) else int(self.width() * (factor or 1.0))

    def attention_scale(self) -> float:
        return float(self.width() ** -0.5)

    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.num_hidden_layers

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps, offset=1.0)

    def attention(self, index: int) -> AttentionRecipe:
        part = replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS))
        if BLOCKS not in self.layers():
            return part
        chosen = None
        if self.layers()[index] == BLOCKS:
            sizes = (self.index_block_size, self.index_topk_blocks, self.index_local_blocks, self.index_head_dim)
            chosen = HeadBlockIndex(*sizes, self.norm())
        return replace(part, head_blocks=HeadBlocksRecipe(self.width(), self.index_head_dim // 2, chosen))

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        dense = MlpRecipe(self.dense_intermediate_size, Activation.CLAMPED_SILU)
        if self.kinds()[index] == DENSE:
            return dense
        part, names = super().feed_forward(index), ("gate_proj", "up_proj", "down_proj")
        assert isinstance(part, ExpertsRecipe)
        gate, up, down = (f"block_sparse_moe.shared_experts.{name}" for name in names)
        shared = MlpRecipe(self.shared_intermediate_size, Activation.CLAMPED_SILU, gate=gate, up=up, down=down)
        expert = replace(part.expert, activation=Activation.CLAMPED_SILU)
        return replace(part, expert=expert, scale=self.routed_scaling_factor, shared=shared)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), unused=("patch_merge_mlp.", "mtp.", "model.mtp."))


CHUNKED = "chunked_attention"
LLAMA4_EXPERTS = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
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
        check_layer_types(kinds, layers, FULL, CHUNKED)
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
        fused, down = LLAMA4_EXPERTS
        return ExpertsRecipe(
            self.num_local_experts,
            self.num_experts_per_tok,
            MlpRecipe(self.intermediate_size, fused=f"{fused}.{{}}", down=f"{down}.{{}}", transposed=True),
            router="feed_forward.router",
            scoring=Scoring.SIGMOID_OF_CHOSEN,
            weighs_inputs=True,
            shared=gated("feed_forward.shared_expert", self.intermediate_size),
            stacked=tuple((name, f"{name}.{{}}.weight") for name in LLAMA4_EXPERTS),
        )


class ErnieSettings(FamilySettings, kw_only=True):
    """Baidu's Ernie 4.5: neighbouring channels are turned against each other."""

    models: ClassVar[str] = "ERNIE 4.5 0.3B"

    default_theta: ClassVar[float] = 500_000.0
    interleaved: ClassVar[bool] = True
    vocab_size: Count = 103_424
    hidden_size: Count = 1024
    intermediate_size: Count = 3072
    num_hidden_layers: Count = 18
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = False

    def biases(self) -> frozenset[str]:
        return QKVO | MLP if self.use_bias else NONE


class ErnieMoeSettings(ErnieSettings, kw_only=True):
    """Ernie 4.5 with experts in most layers, chosen by corrected scores, beside shared ones."""

    models: ClassVar[str] = "ERNIE 4.5 21B A3B, 300B A47B"
    hidden_size: Count = 2560
    intermediate_size: Count = 12_288
    num_hidden_layers: Count = 28
    num_attention_heads: Count = 20
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = None
    moe_intermediate_size: Count = 1536
    moe_k: Count = 6
    moe_num_experts: Count = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: Count = 1
    moe_norm_min: float = 1e-12

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        if (index + 1) % self.moe_layer_interval or not self.moe_layer_start_index <= index <= last:
            return self.mlp()
        channels, shared = self.moe_intermediate_size, None
        if self.moe_num_shared_experts > 0:
            shared = gated("mlp.shared_experts", channels * self.moe_num_shared_experts, biased=self.use_bias)
        return ExpertsRecipe(
            self.moe_num_experts,
            self.moe_k,
            gated_expert(channels),
            normalised=True,
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_shape=(1, self.moe_num_experts),
            precise_router=True,
            shared=shared,
        )

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), head_biased=self.use_bias)


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
