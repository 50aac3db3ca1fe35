"""GLM 4 (Zhipu): half of each head is turned, neighbour by neighbour; fused gates; two or four norms; experts.

And families with the same experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.deepseek import (
    DENSE,
    INDEXED,
    OWN,
    SHARED,
    SPARSE,
    GlmMoeDsaSettings,
    check_kinds,
    first_dense,
    routed,
    with_experts,
)
from pdserve.models.families.settings import (
    FULL,
    HEAD_NORMS,
    LINEAR,
    NONE,
    QKV,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    check_experts,
    check_layer_types,
    draft_layer,
    gated,
    gated_expert,
    rotary_of,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    GateRecipe,
    HeadNorm,
    IndexRecipe,
    KimiDeltaRecipe,
    LayerRecipe,
    MlpRecipe,
    ModelRecipe,
    Norm,
    NormOrder,
    Rotary,
    StreamsRecipe,
)
from pdserve_kernels.feed_forward import LIMITED_AT, SILU_BOUNDS, Activation, Scoring

GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class GlmSettings(FamilySettings, kw_only=True):
    models: ClassVar[str] = "GLM 4 9B"
    partly_turned: ClassVar[bool] = True
    interleaved: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.5
    vocab_size: Count = 151_552
    intermediate_size: Count = 13_696
    num_hidden_layers: Count = 40
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1.5625e-07
    eos_token_id: int | list[int] | None = msgspec.field(default_factory=lambda: [151_329, 151_336, 151_338])
    attention_bias: bool = True

    def biases(self) -> frozenset[str]:
        return QKV if self.attention_bias else NONE

    def mlp(self) -> MlpRecipe:
        return replace(super().mlp(), fused="mlp.gate_up_proj")


class Glm4Settings(GlmSettings, kw_only=True):
    models: ClassVar[str] = "GLM 4 0414, GLM Z1"

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=GLM4_NORMS, order=NormOrder.SANDWICH)


class Glm4MoeSettings(FamilySettings, kw_only=True):
    """GLM 4.5 and 4.6: experts chosen by corrected scores, in groups, beside a shared one."""

    models: ClassVar[str] = "GLM 4.5, 4.6"
    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.5
    vocab_size: Count = 151_552
    intermediate_size: Count = 10_944
    num_hidden_layers: Count = 46
    num_attention_heads: Count = 96
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = None
    use_qk_norm: bool = False
    n_routed_experts: Count = 128
    n_shared_experts: Count = 1
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1408
    routed_scaling_factor: float = 1.0
    n_group: Count = 1
    topk_group: Count = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True

    def biases(self) -> frozenset[str]:
        return QKV if self.attention_bias else NONE

    def attention(self, index: int) -> AttentionRecipe:
        norms = HeadNorm(self.norm(), *HEAD_NORMS) if self.use_qk_norm else None
        return replace(super().attention(index), norms=norms)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return self.mlp() if index < self.first_k_dense_replace else routed(self)

    def recipe(self) -> ModelRecipe:
        whole, count = super().recipe(), self.num_hidden_layers
        return replace(whole, draft=draft_layer(with_experts(whole.layers[-1], routed(self)), count))


class SolarOpenSettings(Glm4MoeSettings, kw_only=True):
    """Upstage's Solar Open: GLM's experts in every layer, and whole heads are turned."""

    models: ClassVar[str] = "Solar Open 100B"

    default_theta: ClassVar[float] = 1_000_000.0
    partly_turned: ClassVar[bool] = False
    turned_part: ClassVar[float] = 1.0
    vocab_size: Count = 196_608
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 64
    head_dim: Count | None = 128
    moe_intermediate_size: Count = 1280
    first_k_dense_replace: int = 0
    intermediate_size: Count = 10_240


class SarvamMoeSettings(Glm4MoeSettings, kw_only=True):
    """Sarvam AI's models: GLM's experts, heads turned as a whole and normalised. Older files have other names."""

    models: ClassVar[str] = "Sarvam 30B"
    default_theta: ClassVar[float] = 8_000_000.0
    turned_part: ClassVar[float] = 1.0
    vocab_size: Count = 262_144
    intermediate_size: Count = 8192
    num_hidden_layers: Count = 19
    num_attention_heads: Count = 64
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 64
    rms_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = 1
    use_qk_norm: bool = True
    num_experts_per_tok: Count = 6
    moe_intermediate_size: Count = 1024
    routed_scaling_factor: float = 2.5
    num_experts: Count | None = None
    num_shared_experts: Count | None = None
    use_qkv_bias: bool | None = None

    def __post_init__(self) -> None:
        self.n_routed_experts = self.num_experts or self.n_routed_experts
        self.n_shared_experts = self.num_shared_experts or self.n_shared_experts
        self.attention_bias = self.attention_bias if self.use_qkv_bias is None else self.use_qkv_bias

    def attention(self, index: int) -> AttentionRecipe:
        fused, out = "attention.query_key_value", "attention.dense"
        biased = frozenset({fused}) if self.attention_bias else NONE
        norms = HeadNorm(self.norm(), "attention.query_layernorm", "attention.key_layernorm")
        return AttentionRecipe(
            self.rotary(), out=out, fused=fused, biased=biased, norms=norms if self.use_qk_norm else None
        )

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        return replace(part, correction="mlp.gate.expert_bias") if isinstance(part, ExpertsRecipe) else part

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), embedding="model.word_embeddings")


class Dots1Settings(Glm4MoeSettings, kw_only=True):
    """rednote's dots.llm1: GLM's experts, whole heads turned and normalised, windows in some layers."""

    models: ClassVar[str] = "dots.llm1"
    partly_turned: ClassVar[bool] = False
    turned_part: ClassVar[float] = 1.0
    vocab_size: Count = 152_064
    hidden_size: Count = 4608
    num_hidden_layers: Count = 62
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 2048
    rms_norm_eps: float = 1e-6
    use_qk_norm: bool = True
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 62
    layer_types: list[str] | None = None

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def windows(self) -> tuple[int | None, ...]:
        window = self.sliding_window or None
        usual = [
            SLIDING if window is not None and index >= self.max_window_layers else FULL
            for index in range(self.num_hidden_layers)
        ]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, window)


class MimoV2FlashSettings(FamilySettings, kw_only=True):
    """Xiaomi's MiMo V2 Flash: DeepSeek V3's experts, values narrower than keys, and windows with sinks.

    Layers with windows have twice the KV heads. Its own code has names for what transformers takes for granted
    (``swa_head_dim`` and others): a file that has them has to say the same.
    """

    models: ClassVar[str] = "MiMo V2 Flash"
    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.334
    vocab_size: Count = 152_576
    intermediate_size: Count = 16_384
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 64
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 192
    v_head_dim: Count = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = None
    sliding_window: Count = 129
    sliding_window_size: int | None = None
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    attention_value_scale: float | None = 0.707
    n_routed_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 2048
    routed_scaling_factor: float | None = 1.0
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    hybrid_layer_pattern: list[int] | None = None
    moe_layer_freq: list[int] | None = None
    swa_num_attention_heads: int | None = None
    swa_num_key_value_heads: int | None = None
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    swa_rope_theta: float | None = None
    add_swa_attention_sink_bias: bool | None = None
    add_full_attention_sink_bias: bool | None = None
    layernorm_epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.sliding_window_size is not None:  # It does not count the newest token.
            self.sliding_window = self.sliding_window_size + 1

    @property
    def n_shared_experts(self) -> int:
        return 0

    def check(self) -> None:
        super().check()
        heads, most = self.num_attention_heads, self.kv_heads() * 2
        if heads % most:
            raise ModelError(f"{heads} heads cannot share the {most} KV heads of layers with windows")
        if self.v_head_dim > self.head_size():
            raise ModelError(f"v_head_dim {self.v_head_dim} is above head_dim, {self.head_size()}")
        if self.rope_scaling is not None:
            raise ModelError("rope_scaling of a MiMo V2 is not supported; rope_parameters is")
        check_kinds(self.kinds(), self.num_hidden_layers)
        for full in (True, False):
            self._check_turned(self._turning(full=full).width)
        for name, used in self._taken_for_granted().items():
            given = getattr(self, name)
            if given is not None and given != used:
                raise ModelError(f"{name} {given!r} is not supported; with the other settings it has to be {used!r}")

    def _taken_for_granted(self) -> dict[str, object]:
        """Returns what the names of the family's own code have to say."""
        return {
            "hybrid_layer_pattern": [int(window is not None) for window in self.windows()],
            "moe_layer_freq": [int(kind == SPARSE) for kind in self.kinds()],
            "swa_num_attention_heads": self.num_attention_heads,
            "swa_num_key_value_heads": self.kv_heads() * 2,
            "swa_head_dim": self.head_size(),
            "swa_v_head_dim": self.v_head_dim,
            "rope_theta": self._turning(full=True).theta,
            "swa_rope_theta": self._turning(full=False).theta,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "layernorm_epsilon": self.rms_norm_eps,
        }

    def biases(self) -> frozenset[str]:
        return QKV if self.attention_bias else NONE

    def turned_channels(self) -> int | None:
        return None  # each kind of layer has its own

    def kinds(self) -> list[str]:
        return self.mlp_layer_types or first_dense(1, self.num_hidden_layers)

    def windows(self) -> tuple[int | None, ...]:
        usual = [SLIDING if index and (index + 1) % 6 else FULL for index in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def _turning(self, *, full: bool) -> Rotary:
        found, theta = self.rotary_of_kind(RotarySettings(), full=full), 5_000_000.0 if full else 10_000.0
        part = self.turned_part if found.partial_rotary_factor is None else found.partial_rotary_factor
        return rotary_of(found, theta, self.max_position_embeddings, int(self.head_size() * part))

    def rotary_of_layer(self, index: int) -> Rotary:
        return self._turning(full=self.windows()[index] is None)

    def attention(self, index: int) -> AttentionRecipe:
        windowed, scale = self.windows()[index] is not None, self.attention_value_scale
        return replace(
            super().attention(index),
            kv_heads=self.kv_heads() * (2 if windowed else 1),
            sinks="self_attn.attention_sink_bias" if windowed else "",
            value_dim=self.v_head_dim,
            value_scale=1.0 if scale is None else scale,
        )

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return routed(self) if self.kinds()[index] == SPARSE else self.mlp()

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), unused=("model.mtp.",))


class OneGroupSettings(FamilySettings, kw_only=True):
    """DeepSeek V3's experts in one group. The weights of the chosen ones add up to one."""

    @property
    def n_group(self) -> int:
        return 1

    @property
    def topk_group(self) -> int:
        return 1

    @property
    def norm_topk_prob(self) -> bool:
        return True


class Hy3Settings(OneGroupSettings, kw_only=True):
    """Tencent's third Hunyuan: heads are normalised before they are turned, and DeepSeek V3's experts."""

    models: ClassVar[str] = "Hy3 295B A21B"
    head_norms: ClassVar[bool] = True
    default_theta: ClassVar[float] = 11_158_840.0
    vocab_size: Count = 120_832
    intermediate_size: Count = 13_312
    num_hidden_layers: Count = 80
    num_attention_heads: Count = 64
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = None
    mlp_layer_types: list[str] | None = None
    n_routed_experts: Count = msgspec.field(name="num_experts", default=192)
    n_shared_experts: Count = msgspec.field(name="num_shared_experts", default=1)
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1536
    routed_scaling_factor: float | None = msgspec.field(name="router_scaling_factor", default=2.826)
    enable_moe_fp32_combine: bool = True
    """Whether transformers adds the shared expert in fp32. Here experts' outputs are added in fp32 in any case."""

    def check(self) -> None:
        super().check()
        check_kinds(self.kinds(), self.num_hidden_layers)

    def kinds(self) -> list[str]:
        return self.mlp_layer_types or first_dense(1, self.num_hidden_layers)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if self.kinds()[index] == DENSE:
            return self.mlp()
        shared = gated("mlp.shared_mlp", self.moe_intermediate_size * self.n_shared_experts)
        return replace(routed(self), router="mlp.router.gate", correction="mlp.expert_bias", shared=shared)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), unused=(f"model.layers.{self.num_hidden_layers}.",))


class AfmoeSettings(OneGroupSettings, kw_only=True):
    """Arcee's Trinity: gated heads that know positions within windows alone, four norms, DeepSeek V3's experts."""

    models: ClassVar[str] = "Trinity Nano, Mini, Large"
    head_norms: ClassVar[bool] = True
    vocab_size: Count = 200_192
    hidden_size: Count = 2048
    intermediate_size: Count = 6144
    num_attention_heads: Count = 16
    head_dim: Count | None = 128
    max_position_embeddings: Count = 16_384
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = None
    sliding_window: Count | None = 1024
    layer_types: list[str] | None = None
    global_attn_every_n_layers: Count = 4
    num_dense_layers: int = 1
    n_routed_experts: Count = msgspec.field(name="num_experts", default=64)
    n_shared_experts: int = msgspec.field(name="num_shared_experts", default=2)
    num_experts_per_tok: Count = 6
    moe_intermediate_size: Count = 1408
    routed_scaling_factor: float | None = msgspec.field(name="route_scale", default=1.0)
    mup_enabled: bool = False

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def windows(self) -> tuple[int | None, ...]:
        every = self.global_attn_every_n_layers
        usual = [SLIDING if (index + 1) % every else FULL for index in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return None if self.windows()[index] is None else self.rotary()

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), gate=GateRecipe("self_attn.gate_proj"))

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if index < self.num_dense_layers:
            return self.mlp()
        return replace(routed(self), router="mlp.router.gate", correction="mlp.expert_bias", precise_router=False)

    def layer(self, index: int) -> LayerRecipe:
        norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
        return replace(super().layer(index), norms=norms, order=NormOrder.SANDWICH)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), embedding_scale=self.hidden_size**0.5 if self.mup_enabled else 1.0)


class LagunaSettings(FamilySettings, kw_only=True):
    """Poolside's Laguna: layers with windows may have more heads, all heads are gated, and a shared expert."""

    models: ClassVar[str] = "Laguna XS 2"
    head_norms: ClassVar[bool] = True
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 100_352
    hidden_size: Count = 2048
    intermediate_size: Count = 8192
    num_hidden_layers: Count = 40
    num_attention_heads: Count = 48
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    eos_token_id: int | list[int] | None = None
    sliding_window: Count | None = 512
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    gating: bool | str = True
    num_attention_heads_per_layer: list[int] | None = None
    num_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512
    moe_routed_scaling_factor: float = 1.0
    moe_apply_router_weight_on_input: bool = False
    moe_router_logit_softcapping: float = 0.0

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts_per_tok, self.num_experts)
        check_kinds(self.kinds(), self.num_hidden_layers)
        if self.gating not in (True, "per-head", "per-element"):
            raise ModelError(f"gating {self.gating!r} is not supported; true, 'per-head' and 'per-element' are")
        if self.moe_apply_router_weight_on_input or self.moe_router_logit_softcapping:
            raise ModelError("moe_apply_router_weight_on_input and moe_router_logit_softcapping are not supported")
        if self.rope_scaling is not None:
            raise ModelError("rope_scaling of a Laguna is not supported; rope_parameters is")
        heads = self.query_heads()
        if len(heads) != self.num_hidden_layers or any(each < 1 or each % self.kv_heads() for each in heads):
            raise ModelError(
                f"num_attention_heads_per_layer has to be a multiple of {self.kv_heads()} KV heads "
                f"for each of {self.num_hidden_layers} layers"
            )
        if len({*zip(heads, self.windows(), strict=True)}) > len({*self.windows()}):
            raise ModelError("num_attention_heads_per_layer is only supported if layers of one kind have the same")
        for full in (True, False):
            self._check_turned(self._turning(full=full).width)

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def turned_channels(self) -> int | None:
        return None  # each kind of layer has its own

    def kinds(self) -> list[str]:
        return self.mlp_layer_types or first_dense(1, self.num_hidden_layers)

    def query_heads(self) -> list[int]:
        """Returns the number of query heads of each layer."""
        return self.num_attention_heads_per_layer or [self.num_attention_heads] * self.num_hidden_layers

    def windows(self) -> tuple[int | None, ...]:
        layers = self.num_hidden_layers
        return windows_of(self.layer_types, [FULL] * layers, layers, self.sliding_window)

    def _turning(self, *, full: bool) -> Rotary:
        found = self.rotary_of_kind(RotarySettings(partial_rotary_factor=0.5), full=full)
        theta = 500_000.0 if full else 10_000.0
        part = 1.0 if found.partial_rotary_factor is None else found.partial_rotary_factor
        return rotary_of(found, theta, self.max_position_embeddings, int(self.head_size() * part))

    def rotary_of_layer(self, index: int) -> Rotary:
        return self._turning(full=self.windows()[index] is None)

    def attention(self, index: int) -> AttentionRecipe:
        return replace(
            super().attention(index),
            heads=self.query_heads()[index],
            gate=GateRecipe("self_attn.g_proj", self.gating != "per-element", Activation.SOFTPLUS),
        )

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if self.kinds()[index] == DENSE:
            return self.mlp()
        return ExpertsRecipe(
            self.num_experts,
            self.num_experts_per_tok,
            gated_expert(self.moe_intermediate_size),
            scoring=Scoring.SIGMOID,
            normalised=True,
            correction="mlp.experts.e_score_correction_bias",
            scale=self.moe_routed_scaling_factor,
            shared=gated("mlp.shared_expert", self.shared_expert_intermediate_size),
        )


class OtherHeads(msgspec.Struct, kw_only=True):
    """The object ``attention_other_setting`` of a Step 3.5: what layers with windows have otherwise."""

    num_attention_heads: Count | None = None
    num_attention_groups: Count | None = None
    head_dim: Count | None = None


class Step3p5Settings(LagunaSettings, kw_only=True):
    """StepFun's Step 3.5, the text part of Step 3.7: Laguna's attention, and bounded activations in some layers.

    Older files have other names, and lists of bases and parts of heads for all layers. Lists may go on with layers
    that draft tokens.
    """

    models: ClassVar[str] = "Step 3.7 Flash"
    layers_differ: ClassVar[bool] = True
    vocab_size: Count = 128_815
    hidden_size: Count = 4096
    intermediate_size: Count = 11_264
    num_hidden_layers: Count = 45
    num_attention_heads: Count = 64
    max_position_embeddings: Count = 128_000
    rms_norm_eps: float = 1e-5
    sliding_window: Count | None = None
    num_attention_groups: Count | None = None
    num_sliding_attention_heads: Count | None = None
    attention_other_setting: OtherHeads | None = None
    query_pre_attn_scalar: float | None = None
    num_experts: Count = msgspec.field(name="n_routed_experts", default=288)
    moe_num_experts: Count | None = None
    moe_top_k: Count | None = None
    moe_intermediate_size: Count = 1280
    moe_layers_enum: str | list[int] | None = None
    moe_router_scaling_factor: float = 1.0
    share_expert_dim: Count = 1280
    share_expert_dims: Count | None = None
    swiglu_limits: list[float | None] | None = None
    swiglu_limits_shared: list[float | None] | None = None
    rope_theta: float | list[float] | None = None  # type: ignore[assignment]  # older files have one for each layer
    partial_rotary_factors: list[float] | None = None

    def __post_init__(self) -> None:
        self.num_key_value_heads = self.num_attention_groups or self.num_key_value_heads
        self.num_experts = self.moe_num_experts or self.num_experts
        self.num_experts_per_tok = self.moe_top_k or self.num_experts_per_tok
        self.share_expert_dim = self.share_expert_dims or self.share_expert_dim
        layers = self.num_hidden_layers
        self.layer_types = self.layer_types and self.layer_types[:layers]
        self.mlp_layer_types = self.mlp_layer_types and self.mlp_layer_types[:layers]
        others = self.attention_other_setting or OtherHeads()
        self.num_sliding_attention_heads = (
            self.num_sliding_attention_heads or others.num_attention_heads or self.num_attention_heads
        )
        self.rope_parameters = self._rotary_settings()
        self.rope_scaling = self.rope_theta = None

    def _rotary_settings(self) -> RotarySettings:
        """Returns what the file says of frequencies, as newer files say it."""
        given, scaling = self.rope_parameters, self.rope_scaling
        if given is not None and (given.full_attention is not None or given.sliding_attention is not None):
            return given
        kinds = self.layer_types or [FULL]
        found = dict[str, RotarySettings]()
        for kind in (FULL, SLIDING):
            first = kinds.index(kind) if kind in kinds else 0
            own = RotarySettings(rope_theta=_of_layer(self.rope_theta, first))
            own.partial_rotary_factor = _of_layer(self.partial_rotary_factors, first)
            if kind == FULL and scaling is not None:
                theta = scaling.rope_theta or own.rope_theta
                part = scaling.partial_rotary_factor or own.partial_rotary_factor
                own = msgspec.structs.replace(scaling, rope_theta=theta, partial_rotary_factor=part)
            found[kind] = own
        return RotarySettings(full_attention=found[FULL], sliding_attention=found[SLIDING])

    def check(self) -> None:
        super().check()
        others = self.attention_other_setting or OtherHeads()
        given, used = (others.num_attention_groups, others.head_dim), (self.kv_heads(), self.head_size())
        if any(own not in (None, usual) for own, usual in zip(given, used, strict=True)):
            raise ModelError("attention_other_setting is only supported with the KV heads and channels of other layers")
        heads = {str(index): {"num_attention_heads": each} for index, each in enumerate(self.query_heads())}
        own = self.per_layer_config
        if own is not None and (not isinstance(own, dict) or any(heads.get(str(int(i))) != own[i] for i in own)):
            raise ModelError("per_layer_config is only supported if it has the heads of num_sliding_attention_heads")
        for limits in (self.swiglu_limits, self.swiglu_limits_shared):
            if limits and (len(limits) < self.num_hidden_layers or not set(limits) <= {None, 0.0, *SILU_BOUNDS}):
                known = ", ".join(f"{bound:g}" for bound in SILU_BOUNDS)
                raise ModelError(f"swiglu_limits must be one of 0, {known} for each of {self.num_hidden_layers} layers")

    def attention_scale(self) -> float:
        return float((self.query_pre_attn_scalar or self.head_size()) ** -0.5)

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps, offset=1.0)

    def kinds(self) -> list[str]:
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types
        given, layers = self.moe_layers_enum, self.num_hidden_layers
        if given is None:
            return first_dense(3, layers)
        numbers = given if isinstance(given, list) else [int(each) for each in given.split(",") if each.strip()]
        return [SPARSE if index in numbers else DENSE for index in range(layers)]

    def query_heads(self) -> list[int]:
        windowed = self.num_sliding_attention_heads or self.num_attention_heads
        return [self.num_attention_heads if window is None else windowed for window in self.windows()]

    def _turning(self, *, full: bool) -> Rotary:
        found = self.rotary_of_kind(RotarySettings(), full=full)
        part = 1.0 if found.partial_rotary_factor is None else found.partial_rotary_factor
        return rotary_of(found, 10_000.0, self.max_position_embeddings, int(self.head_size() * part))

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), gate=GateRecipe("self_attn.g_proj", one=True))

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        shared = _bounded(self.swiglu_limits_shared, index)
        if self.kinds()[index] == DENSE:
            return replace(self.mlp(), activation=shared)
        gate, up, down = (f"moe.{name}_proj" for name in ("gate", "up", "down"))
        names = MlpRecipe(self.moe_intermediate_size, gate=f"{gate}.{{}}", up=f"{up}.{{}}", down=f"{down}.{{}}")
        return ExpertsRecipe(
            self.num_experts,
            self.num_experts_per_tok,
            replace(names, activation=_bounded(self.swiglu_limits, index)),
            router="moe.gate",
            scoring=Scoring.SIGMOID,
            normalised=True,
            correction="moe.router_bias",
            scale=self.moe_router_scaling_factor,
            shared=replace(gated("share_expert", self.share_expert_dim), activation=shared),
            stacked=tuple((f"{name}.weight", f"{name}.{{}}.weight") for name in (gate, up, down)),
        )

    def recipe(self) -> ModelRecipe:
        # Released files have three layers that draft tokens.
        drafting = tuple(f"model.layers.{self.num_hidden_layers + number}." for number in range(3))
        return replace(super().recipe(), unused=drafting)


def _of_layer(given: float | list[float] | None, index: int) -> float | None:
    """Returns the value of a layer, if there is one for all or for each."""
    return given[index] if isinstance(given, list) else given


def _bounded(limits: list[float | None] | None, index: int) -> Activation:
    """Returns the activation of a layer. A limit of 0 is none."""
    limit = limits[index] if limits else None
    return SILU_BOUNDS[limit] if limit else Activation.SILU


class Glm4vTextSettings(Glm4Settings, kw_only=True):
    """The text part of a GLM 4.1V. Whole heads are turned if the file does not say otherwise."""

    three_axes: ClassVar[bool] = True
    turned_part: ClassVar[float] = 1.0
    head_dim: Count | None = None
    max_position_embeddings: Count = 32_768
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = None

    def check(self) -> None:
        super().check()
        if self.head_size() * self.num_attention_heads != self.hidden_size:
            raise ModelError(f"head_dim {self.head_dim} is not the share of one of {self.num_attention_heads} heads")

    def biases(self) -> frozenset[str]:
        return QKV


class Glm4vMoeTextSettings(Glm4MoeSettings, kw_only=True):
    """The text part of a GLM 4.5V."""

    three_axes: ClassVar[bool] = True
    vocab_size: Count = 151_424
    max_position_embeddings: Count = 65_536
    attention_bias: bool = True

    def check(self) -> None:
        super().check()
        if self.use_qk_norm:
            raise ModelError("use_qk_norm of a GLM with images is not supported")


class GlmDeltaSettings(msgspec.Struct):
    """The object ``linear_attn_config`` of a GLM 5.3. Kinds of layers are in ``layer_types`` alone."""

    head_dim: Count | None = None
    num_heads: Count | None = None
    short_conv_kernel_size: Count | None = None
    gate_lower_bound: float | msgspec.UnsetType | None = msgspec.UNSET
    safe_gate: bool = True


class Glm5NextTextSettings(GlmMoeDsaSettings, kw_only=True):
    """GLM 5.3: most layers have a gated delta net, and the others latents, of which pools of tokens are chosen.

    Nothing knows positions. There are several residuals, whose mean the head is given.
    """

    models: ClassVar[str] = "GLM 5.3 Flash"
    hidden_size: Count = 4096
    num_hidden_layers: Count = 45
    head_dim: int | None = None
    max_position_embeddings: Count = 1_048_576
    eos_token_id: int | list[int] | None = None
    n_routed_experts: Count = 288
    q_lora_rank: Count | None = 1536
    qk_nope_head_dim: Count = 256
    qk_rope_head_dim: int = 0  # nothing is turned
    index_kpool: Count = 16
    index_kpool_always_select_tail: bool = True
    swiglu_limit: float = LIMITED_AT
    linear_head_dim: Count = 128
    linear_num_heads: Count = 64
    linear_conv_kernel_dim: Count = 4
    linear_lower_bound: float | None = -5.0
    linear_attn_config: GlmDeltaSettings | None = None
    hc_mult: Count = 4
    hc_sinkhorn_iters: Count = 20
    hc_eps: float = 1e-6

    def __post_init__(self) -> None:
        own = self.linear_attn_config
        if own is None:
            return
        self.linear_head_dim = own.head_dim or self.linear_head_dim
        self.linear_num_heads = own.num_heads or self.linear_num_heads
        self.linear_conv_kernel_dim = own.short_conv_kernel_size or self.linear_conv_kernel_dim
        if not isinstance(own.gate_lower_bound, msgspec.UnsetType):
            self.linear_lower_bound = own.gate_lower_bound
        if own.safe_gate and self.linear_lower_bound is None:
            self.linear_lower_bound = -5.0

    def check(self) -> None:
        super().check()
        known = {"qk_rope_head_dim": 0, "index_kpool_always_select_tail": True, "swiglu_limit": LIMITED_AT}
        for name, value in known.items():
            if (given := getattr(self, name)) != value:
                raise ModelError(f"{name} {given!r} is not supported; supported: {value!r}")
        if self.first_k_dense_replace != 3 and self.mlp_layer_types is None:
            raise ModelError(f"first_k_dense_replace {self.first_k_dense_replace} is not supported; supported: 3")
        if self.index_kpool < 2 or self.index_topk % self.index_kpool:
            raise ModelError(
                f"pools of {self.index_kpool} tokens (index_kpool) have to be of more than one, and index_topk, "
                f"{self.index_topk}, a multiple of it"
            )

    def _check_layers(self) -> None:
        kinds, sources = self.layers(), self.sources()
        check_layer_types(kinds, self.num_hidden_layers, INDEXED, LINEAR)
        for index, kind in enumerate(kinds):
            before = (kinds[index - 1], sources[index - 1])
            if kind == INDEXED and sources[index] == SHARED and before != (INDEXED, OWN):
                raise ModelError(f"layer {index} is {SHARED!r} in indexer_types, and the one before it chooses nothing")

    def scaling(self) -> RotarySettings:
        return RotarySettings()

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return None

    def layers(self) -> list[str]:
        """Returns for each layer whether it has latents or a delta net."""
        usual = [INDEXED if index % 4 == 3 else LINEAR for index in range(self.num_hidden_layers)]
        return usual if self.layer_types is None else [INDEXED if kind == FULL else kind for kind in self.layer_types]

    def head_size(self) -> int:
        # Of a token, an indexer's gates are kept, too.
        return super().head_size() + self.index_head_dim

    def index(self, index: int) -> IndexRecipe:
        return replace(super().index(index), pool=self.index_kpool)

    def attention(self, index: int) -> AttentionRecipe:
        part = super().attention(index)
        assert part.latent is not None
        return replace(part, latent=replace(part.latent, norm=self.norm()))

    def mlp(self) -> MlpRecipe:
        return replace(super().mlp(), activation=Activation.LIMITED_SILU)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        if not isinstance(part, ExpertsRecipe):
            return part
        limited = replace(part.expert, activation=Activation.LIMITED_SILU)
        shared = part.shared and replace(part.shared, activation=Activation.LIMITED_SILU)
        return replace(part, expert=limited, shared=shared)

    def layer(self, index: int) -> LayerRecipe:
        streams = StreamsRecipe(self.hc_mult, self.hc_sinkhorn_iters, self.hc_eps, self.norm(), head="")
        layer = replace(super().layer(index), streams=streams)
        if self.layers()[index] == INDEXED:
            return layer
        delta = KimiDeltaRecipe(
            self.linear_num_heads,
            self.linear_head_dim,
            self.linear_conv_kernel_dim,
            self.norm(),
            flat_rates=True,
            least_decay=self.linear_lower_bound,
        )
        return replace(layer, attention=None, mixer=delta)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), draft=None, unused=(f"model.layers.{self.num_hidden_layers}.",))
