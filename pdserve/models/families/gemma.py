"""Gemma 1, 2, 3 and 3n (Gemma Team, 2024 and 2025), Gemma 4 (2026), and Muse Glimmer, which has their norms.

Gemma 2 and later have windows in many layers, and four norms in each. Up to Gemma 3, norms' weights are stored less
one. In Gemma 3n and 4, the last layers may read the keys and values of earlier ones, and each may have an input of its
own for each token. Layers of Gemma 3n compute one of several residuals. In Gemma 4, layers with a window have other
heads than those that see all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import msgspec

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
    rotary_of,
    windows_of,
)
from pdserve.models.recipe import (
    AltUpRecipe,
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    GateRecipe,
    HeadNorm,
    LayerRecipe,
    LowRankRecipe,
    MlpBesideExperts,
    MlpRecipe,
    ModelRecipe,
    Norm,
    NormOrder,
    PerLayerEmbedding,
    PerLayerInput,
    Rotary,
)
from pdserve_kernels.feed_forward import Activation

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
        self._check_gemma2()

    def _check_gemma2(self) -> None:
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
        self._check_rotary()

    def _check_rotary(self) -> None:
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


def kv_source(windows: Sequence[int | None], shared: int, index: int) -> int | None:
    """Returns the layer whose keys and values layer ``index`` reads; None if it has its own.

    The last ``shared`` layers (``num_kv_shared_layers``) read those of the last layer before them with the same window.
    Raises ModelError if there is none, or if ``shared`` is below 0.
    """
    if shared < 0:
        raise ModelError(f"num_kv_shared_layers is {shared}")
    first = len(windows) - shared
    if index < first:
        return None
    having = [other for other in range(max(0, first)) if windows[other] == windows[index]]
    if not having:
        raise ModelError(f"layer {index} reads keys and values of an earlier layer of its kind, and there is none")
    return having[-1]


class Gemma3nSettings(Gemma3Settings, kw_only=True):
    """Layers compute one of several residuals, and read keys and values of others. Many gates are 0."""

    models: ClassVar[str] = "Gemma 3n"
    vocab_size: Count = 262_400
    hidden_size: Count = 2048
    intermediate_size: Count | list[Count] = 16_384  # type: ignore[assignment]  # one for all layers, or one for each
    num_hidden_layers: Count = 35
    num_key_value_heads: Count | None = 2
    max_position_embeddings: Count = 32_768
    sliding_window: Count | None = 512
    final_logit_softcapping: float | None = 30.0
    vocab_size_per_layer_input: Count = 262_144
    hidden_size_per_layer_input: Count = 256
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    altup_num_inputs: Annotated[int, msgspec.Meta(ge=2)] = 4
    num_kv_shared_layers: int = 15
    laurel_rank: Count = 64
    activation_sparsity_pattern: list[Annotated[float, msgspec.Meta(ge=0, lt=1)]] | None = None

    def check(self) -> None:
        self._check_gemma2()
        self._check_rotary()
        for name in ("intermediate_size", "activation_sparsity_pattern"):
            given = getattr(self, name)
            if isinstance(given, list) and len(given) != self.num_hidden_layers:
                raise ModelError(f"{name} has {len(given)} values for {self.num_hidden_layers} layers")
        if not 0 <= self.altup_active_idx < self.altup_num_inputs:
            raise ModelError(f"altup_active_idx {self.altup_active_idx} is none of {self.altup_num_inputs} residuals")
        for index in range(self.num_hidden_layers):
            self.source(index)

    def attention_scale(self) -> float:
        return 1.0

    def full_every(self) -> int:
        return 5

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps)

    def channels(self) -> int:
        return max(self._channels(index) for index in range(self.num_hidden_layers))

    def source(self, index: int) -> int | None:
        """Returns the layer whose keys and values one layer reads; None if it has its own. Raises ModelError."""
        return kv_source(self.windows(), self.num_kv_shared_layers, index)

    def attention(self, index: int) -> AttentionRecipe:
        return replace(
            super().attention(index),
            value_norm=replace(self.norm(), weighted=False),
            kv_from=self.source(index),
        )

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        usual = 0.95 if index < 10 < self.num_hidden_layers else 0.0
        given = self.activation_sparsity_pattern
        sparsity = usual if given is None else given[index]
        return MlpRecipe(self._channels(index), Activation.GELU_TANH, sparsity=sparsity)

    def layer(self, index: int) -> LayerRecipe:
        return replace(
            super().layer(index),
            per_layer=PerLayerInput(Activation.GELU_TANH),
            streams=AltUpRecipe(self.altup_num_inputs, self.altup_active_idx, self.norm(), self.altup_correct_scale),
            beside=LowRankRecipe(self.laurel_rank),
        )

    def recipe(self) -> ModelRecipe:
        recipe = super().recipe()
        reading = [index for index in range(self.num_hidden_layers) if self.source(index) is not None]
        return replace(
            recipe,
            per_layer=PerLayerEmbedding(self.vocab_size_per_layer_input, self.hidden_size_per_layer_input),
            unused=unread_keys(recipe, reading),
        )

    def _channels(self, index: int) -> int:
        given = self.intermediate_size
        return given[index] if isinstance(given, list) else given


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""The tensors ``[experts, out, in]`` of all experts of a layer."""
OF_OTHERS = ("k_proj", "v_proj", "k_norm", "v_norm")
"""Tensors that files have of layers that read keys and values of others, too. Nothing uses them."""


def unread_keys(recipe: ModelRecipe, reading: Sequence[int]) -> tuple[str, ...]:
    """Returns the beginnings of the names of keys and values that layers ``reading`` those of others do not use."""
    return tuple(f"{recipe.layer_prefix}{index}.self_attn.{name}." for index in reading for name in OF_OTHERS)


class LayerSettings(msgspec.Struct, forbid_unknown_fields=True):
    """What ``per_layer_config`` says of one layer."""

    head_dim: Count | None = None
    num_key_value_heads: Count | None = None


class Gemma4Settings(FamilySettings, kw_only=True):
    """Heads are normalised, values without weights. Scores are not scaled."""

    models: ClassVar[str] = "Gemma 4"
    layers_differ: ClassVar[bool] = True
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 262_144
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Count = 30
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    global_head_dim: Count | None = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, LayerSettings] | None = None
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 131_072
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    sliding_window: Count = 512
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    vocab_size_per_layer_input: Count = 262_144
    hidden_size_per_layer_input: int | None = 256
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False
    num_experts: Count | None = None
    top_k_experts: Count | None = None
    moe_intermediate_size: Count | None = None

    def check(self) -> None:
        self._check_shared()
        if self.hidden_activation != "gelu_pytorch_tanh":
            raise ModelError(
                f"hidden_activation {self.hidden_activation!r} is not supported; only 'gelu_pytorch_tanh' is"
            )
        numbers = range(self.num_hidden_layers)
        for key in self.per_layer_config or ():
            if not key.isdecimal() or int(key) not in numbers:
                raise ModelError(f"per_layer_config has {key!r}, which is no number of {len(numbers)} layers")
        # With "vision", tokens of an image see each other. There are none in a text.
        if self.use_bidirectional_attention not in (None, "vision"):
            raise ModelError("use_bidirectional_attention of all tokens of a Gemma is not supported")
        if (bound := self.final_logit_softcapping) is not None and bound < 0:
            raise ModelError(f"final_logit_softcapping is {bound}; a bound has to be above 0, and 0 is none")
        if self.rope_scaling is not None:
            raise ModelError("rope_scaling of a Gemma 4 is not supported; rope_parameters is")
        sizes = (self.num_experts, self.top_k_experts, self.moe_intermediate_size)
        if self.enable_moe_block and None in sizes:
            raise ModelError("enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size")
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise ModelError(
                f"vocab_size_per_layer_input is {self.vocab_size_per_layer_input}, less than vocab_size, "
                f"{self.vocab_size}"
            )
        for index in range(self.num_hidden_layers):
            shape = self.layer_shape(index)
            if (shape.head_dim or 0) % 2 or self.num_attention_heads % (shape.num_key_value_heads or 1):
                raise ModelError(f"layer {index} has heads that cannot be computed: {shape}")
            self.source(index)

    def attention_scale(self) -> float:
        return 1.0

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def turned_channels(self) -> int | None:
        return None

    def windows(self) -> tuple[int | None, ...]:
        layers = self.num_hidden_layers
        usual = [SLIDING if number % 6 else FULL for number in range(1, layers + 1)]
        # transformers makes the last layer one that sees all, whatever the file says.
        given = self.layer_types and [*self.layer_types[:-1], FULL]
        return windows_of(given, [*usual[:-1], FULL], layers, self.sliding_window)

    def layer_shape(self, index: int) -> LayerSettings:
        """Returns the heads of one layer."""
        usual = LayerSettings(self.head_dim, self.num_key_value_heads)
        if self.per_layer_config is not None:
            # transformers writes numbers with as many digits as the last one has.
            said = {int(key): settings for key, settings in self.per_layer_config.items()}
            own = said.get(index, LayerSettings())
        elif self.windows()[index] is None:
            heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
            own = LayerSettings(self.global_head_dim, heads)
        else:
            own = LayerSettings()
        return LayerSettings(
            own.head_dim or usual.head_dim, own.num_key_value_heads or usual.num_key_value_heads or self.kv_heads()
        )

    def source(self, index: int) -> int | None:
        """Returns the layer whose keys and values one layer reads; None if it has its own. Raises ModelError."""
        return kv_source(self.windows(), self.num_kv_shared_layers, index)

    def rotary_of_layer(self, index: int) -> Rotary:
        usual = RotarySettings(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0)
        own = self.rotary_of_kind(usual, full=self.windows()[index] is None)
        return rotary_of(own, self.default_theta, self.max_position_embeddings)

    def attention(self, index: int) -> AttentionRecipe:
        norm, shape, full = self.norm(), self.layer_shape(index), self.windows()[index] is None
        part = replace(
            super().attention(index),
            norms=HeadNorm(norm, *HEAD_NORMS),
            value_norm=replace(norm, weighted=False),
            head_dim=shape.head_dim,
            kv_heads=shape.num_key_value_heads,
            kv_from=self.source(index),
        )
        return replace(part, value="") if self.attention_k_eq_v and full else part

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        wide = self.use_double_wide_mlp and self.source(index) is not None
        mlp = MlpRecipe(self.intermediate_size * (2 if wide else 1), Activation.GELU_TANH)
        if not self.enable_moe_block:
            return mlp
        fused, down = EXPERTS
        experts = ExpertsRecipe(
            self.num_experts or 1,
            self.top_k_experts or 1,
            MlpRecipe(
                self.moe_intermediate_size or 1, Activation.GELU_TANH, fused=f"{fused}.{{}}", down=f"{down}.{{}}"
            ),
            router="router.proj",
            normalised=True,
            factors="router.per_expert_scale",
            stacked=tuple((name, f"{name}.{{}}.weight") for name in EXPERTS),
        )
        return MlpBesideExperts(
            mlp,
            experts,
            before_mlp=FOUR_NORMS[2],
            after_mlp=f"{FOUR_NORMS[3]}_1",
            before_experts=f"{FOUR_NORMS[2]}_2",
            after_experts=f"{FOUR_NORMS[3]}_2",
            router_weights="router.scale",
            router_scale=self.hidden_size**-0.5,
        )

    def layer(self, index: int) -> LayerRecipe:
        norms = (*FOUR_NORMS[:2], "", FOUR_NORMS[3]) if self.enable_moe_block else FOUR_NORMS
        return replace(
            super().layer(index),
            norms=norms,
            order=NormOrder.SANDWICH,
            per_layer=PerLayerInput(Activation.GELU_TANH) if self.hidden_size_per_layer_input else None,
            factor="layer_scalar",
        )

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps)

    def recipe(self) -> ModelRecipe:
        recipe, channels = super().recipe(), self.hidden_size_per_layer_input
        reading = [index for index in range(self.num_hidden_layers) if self.source(index) is not None]
        return replace(
            recipe,
            embedding_scale=self.hidden_size**0.5,
            logits_cap=self.final_logit_softcapping or None,
            per_layer=PerLayerEmbedding(self.vocab_size_per_layer_input, channels) if channels else None,
            unused=unread_keys(recipe, reading),
        )


class Gemma4UnifiedSettings(Gemma4Settings, kw_only=True):
    """The Gemma 4 whose images and sounds have no encoders. No layer has an input of its own."""

    models: ClassVar[str] = "Gemma 4 12B"
    max_position_embeddings: Count = 262_144
    sliding_window: Count = 1024
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: int | None = None


class MuseGlimmerTextSettings(FamilySettings, kw_only=True):
    """The text part of Meta's Muse Glimmer. Heads are gated, and normalised without weights; embeddings, too."""

    models: ClassVar[str] = "Muse Glimmer 30B"
    vocab_size: Count = 202_048
    hidden_size: Count = 6656
    intermediate_size: Count = 19_968
    num_hidden_layers: Count = 52
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    hidden_act: str = msgspec.field(name="hidden_activation", default="silu")
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 200_001
    sliding_window: Count | None = 2048
    layer_types: list[str] | None = None
    final_logit_softcapping: float = 20.0
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    post_norm_eps: float = 1e-8
    layer_rope_theta: list[float] | None = None

    def check(self) -> None:
        super().check()
        given = self.layer_rope_theta or []
        if len(given) not in (0, self.num_hidden_layers) or not {*given} <= {0, self.rotary().theta}:
            raise ModelError("layer_rope_theta has to be rope_theta, or 0 for none, for each layer")

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def attention_scale(self) -> float:
        # Queries are multiplied by the factor behind their norm.
        return super().attention_scale() * self.qk_scale_factor

    def windows(self) -> tuple[int | None, ...]:
        layers = self.num_hidden_layers
        usual = [SLIDING if (layers - 1 - index) % 4 else FULL for index in range(layers)]
        return windows_of(self.layer_types, usual, layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        given = self.layer_rope_theta
        knows = (self.num_hidden_layers - 1 - index) % 4 if given is None else given[index]
        return self.rotary() if knows else None

    def attention(self, index: int) -> AttentionRecipe:
        norms = HeadNorm(Norm(self.rms_norm_eps, weighted=False), *HEAD_NORMS)
        return replace(super().attention(index), norms=norms, gate=GateRecipe("self_attn.gate_proj"))

    def layer(self, index: int) -> LayerRecipe:
        before = Norm(self.rms_norm_eps, offset=1.0)
        return replace(
            super().layer(index),
            norm=before,
            other_norm=replace(before, eps=self.post_norm_eps),
            norms=FOUR_NORMS,
            order=NormOrder.SANDWICH,
        )

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            embedding_norm=Norm(self.rms_norm_eps, weighted=False),
            logits_scale=self.output_multiplier,
            logits_cap=self.final_logit_softcapping,
        )
