"""Has what the families share: their settings, as a ``config.json`` has them, and the recipe that follows from these.

What a file leaves out has the value that transformers gives it. transformers does not read the file itself, because it
loads parts of torch for that which take three seconds of every start; ``tests/models/test_family_settings.py`` compares
the two for each family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import msgspec

from pdserve.errors import ModelError
from pdserve.models.recipe import (
    AttentionRecipe,
    DraftRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    HeadNorm,
    LayerRecipe,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    MlpRecipe,
    ModelRecipe,
    Norm,
    PartialScaling,
    QueryScale,
    Rotary,
    YarnScaling,
)
from pdserve_kernels.feed_forward import Activation

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SELF_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
QKV = frozenset(SELF_ATTENTION[:3])
QKVO = frozenset(SELF_ATTENTION)
MLP = frozenset({"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
NONE: frozenset[str] = frozenset()
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "xielu": Activation.XIELU,
}
"""transformers' names of activations."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class RotarySettings(msgspec.Struct, kw_only=True):
    """The object ``rope_parameters``, or ``rope_scaling`` in older files. Gemma 3 has one for each kind of layer."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: Count | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    partial_rotary_factor: float | None = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    alpha: float | None = None
    llama_4_scaling_beta: float | None = None
    full_attention: RotarySettings | None = None
    sliding_attention: RotarySettings | None = None

    def of_kind(self, *, full: bool) -> RotarySettings:
        """Returns the settings of the layers that see all tokens, or of the others. Raises ModelError without any."""
        found = self.full_attention if full else self.sliding_attention
        if found is None:
            raise ModelError(f"rope_parameters has nothing for {FULL if full else SLIDING!r}")
        return found


def check_experts(chosen: int, count: int) -> None:
    """Raises ModelError if so many experts a token cannot be chosen from ``count``."""
    if not 0 < chosen <= count:
        raise ModelError(
            f"{chosen} experts a token (num_experts_per_tok) cannot be chosen from {count} (num_local_experts)"
        )


def gated(prefix: str, channels: int, *, biased: bool = False) -> MlpRecipe:
    """Returns a gated part whose tensors, named ``prefix``, have the usual names."""
    gate, up, down = (f"{prefix}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    biases = frozenset({gate, up, down}) if biased else NONE
    return MlpRecipe(channels, gate=gate, up=up, down=down, biased=biases)


def check_layer_types(kinds: Sequence[str], layers: int, *known: str) -> None:
    """Raises ModelError unless ``kinds``, those of ``layer_types``, are one of ``known`` for each of ``layers``."""
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise ModelError(f"layer_types must be one of {' and '.join(map(repr, known))} for each of {layers} layers")


def gated_expert(channels: int) -> MlpRecipe:
    """Returns an expert with the usual names."""
    return gated("mlp.experts.{}", channels)


def renamed_in_layers(layers: int, stored: str, own: str) -> tuple[tuple[str, str], ...]:
    """Returns ``ModelRecipe.renamed`` for the part ``stored`` of each layer, which a recipe calls ``own``."""
    prefixes = [f"model.layers.{index}." for index in range(layers)]
    return tuple((f"{prefix}{stored}.", f"{prefix}{own}.") for prefix in prefixes)


def in_one_tensor(experts: ExpertsRecipe, part: str = "mlp.experts") -> ExpertsRecipe:
    """Returns experts of which two tensors of ``part`` hold all of a layer: gates with ups, and downs."""
    fused, down = f"{part}.gate_up_proj", f"{part}.down_proj"
    expert = MlpRecipe(experts.expert.channels, fused=f"{fused}.{{}}", down=f"{down}.{{}}")
    return replace(experts, expert=expert, stacked=tuple((name, f"{name}.{{}}.weight") for name in (fused, down)))


def draft_layer(layer: LayerRecipe, index: int) -> DraftRecipe:
    """Returns the layer that drafts tokens as DeepSeek V3 names its tensors: as those of layer ``index``."""
    prefix = f"model.layers.{index}."
    return DraftRecipe(
        layer,
        tensors=prefix,
        prefix=prefix,
        projection=f"{prefix}eh_proj",
        embedding_norm=f"{prefix}enorm",
        hidden_norm=f"{prefix}hnorm",
        last_norm=f"{prefix}shared_head.norm",
        copies=(f"{prefix}embed_tokens.", f"{prefix}shared_head.head."),
    )


class FamilySettings(msgspec.Struct, kw_only=True):
    """The settings that all families share, with Llama's values for those that a file leaves out.

    The recipe is that of Llama. A family overrides what it has otherwise.
    """

    models: ClassVar[str]
    """Models of the family that one may know, in words for people."""
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    """The values of ``hidden_act`` that are known to be computed exactly."""
    head_norms: ClassVar[bool] = False
    """Whether the queries and keys of each head are normalised."""
    partly_turned: ClassVar[bool] = False
    """Whether ``partial_rotary_factor`` is honoured."""
    interleaved: ClassVar[bool] = False
    """Whether neighbouring channels are turned against each other."""
    layers_differ: ClassVar[bool] = False
    """Whether ``per_layer_config``, settings of single layers, is honoured."""
    three_axes: ClassVar[bool] = False
    """Whether positions have three axes. Those of text are equal, so that they turn heads as one would."""
    default_theta: ClassVar[float] = 10_000.0
    """The base of the frequencies if the file does not have it."""
    turned_part: ClassVar[float] = 1.0
    """The part of a head that is turned if the file does not say it."""
    quantisations: ClassVar[frozenset[str]] = frozenset()
    """The values of ``quant_method`` whose weights are read."""

    vocab_size: Count = 32_000
    hidden_size: Count = 4096
    intermediate_size: Count = 11_008
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 32
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Count = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = 2
    rope_theta: float | None = None
    rope_scaling: RotarySettings | None = None
    rope_parameters: RotarySettings | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: float | None = None
    per_layer_config: object = None
    is_causal: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False

    def check(self) -> None:
        """Raises ModelError for a setting that would be computed wrongly."""
        self._check_shared()
        self._check_activation("hidden_act")

    def left_to_transformers(self) -> bool:
        """Returns whether there is a setting that no part computes, and transformers' code does."""
        return False

    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def channels(self) -> int:
        """Returns the channels of a feed-forward part that is no expert."""
        return self.intermediate_size

    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def attention_scale(self) -> float:
        """Returns the factor of the attention scores."""
        return float(self.head_size() ** -0.5)

    def attention_cap(self) -> float | None:
        """Returns the bound of the attention scores; None if they have none."""
        return None

    def biases(self) -> frozenset[str]:
        """Returns the names of the projections that have a bias."""
        return (QKVO if self.attention_bias else NONE) | (MLP if self.mlp_bias else NONE)

    def windows(self) -> tuple[int | None, ...]:
        """Returns the number of tokens that each layer sees; None for a layer that sees all."""
        return (None,) * self.num_hidden_layers

    def scaling(self) -> RotarySettings:
        """Returns what the file says of rotary frequencies, under the newer or the older name."""
        empty = RotarySettings()
        if self.rope_scaling is not None and self.rope_scaling != empty:
            return self.rope_scaling
        return self.rope_parameters or empty

    def rotary(self) -> Rotary:
        """Returns the frequencies of the layers that see all tokens."""
        chosen = self.scaling()
        if chosen.full_attention is not None or chosen.sliding_attention is not None:
            raise ModelError("rotary frequencies for each kind of layer are only supported in a Gemma 3")
        if self.original_max_position_embeddings is not None:
            chosen = msgspec.structs.replace(
                chosen, original_max_position_embeddings=self.original_max_position_embeddings
            )
        if self.three_axes and "mrope" in (chosen.rope_type, chosen.type):
            chosen = msgspec.structs.replace(chosen, rope_type="default", type=None)
        theta = self.default_theta if self.rope_theta is None else self.rope_theta
        return rotary_of(chosen, theta, self.max_position_embeddings, self.turned_channels(), self.interleaved)

    def rotary_of_kind(self, usual: RotarySettings, *, full: bool) -> RotarySettings:
        """Returns what the file says of layers that see all tokens, or of the others.

        If it says nothing of frequencies, layers that see all have the ``usual`` ones. Raises ModelError if it leaves
        out a kind.
        """
        if self.rope_parameters is None:
            return usual if full else RotarySettings()
        return self.rope_parameters.of_kind(full=full)

    def turned_channels(self) -> int | None:
        """Returns how many channels of a head are turned; None for all."""
        given = (self.rope_parameters, self.rope_scaling)
        factors = [each.partial_rotary_factor for each in (*given, self) if each is not None]
        factor = next((factor for factor in factors if factor is not None), self.turned_part)
        return None if factor == 1.0 else int(self.head_size() * factor)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary()

    def norm(self) -> Norm:
        """Returns the kind of the norms of layers and of the last one."""
        return Norm(self.rms_norm_eps)

    def attention(self, index: int) -> AttentionRecipe:
        return AttentionRecipe(
            rotary=self.rotary_of_layer(index),
            window=self.windows()[index],
            biased=self.biases() & QKVO,
            norms=HeadNorm(self.norm(), *HEAD_NORMS) if self.head_norms else None,
        )

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return self.mlp()

    def mlp(self) -> MlpRecipe:
        return MlpRecipe(self.intermediate_size, ACTIVATIONS[self.hidden_act], biased=self.biases() & MLP)

    def layer(self, index: int) -> LayerRecipe:
        return LayerRecipe(self.attention(index), self.feed_forward(index), self.norm())

    def recipe(self) -> ModelRecipe:
        layers = tuple(self.layer(index) for index in range(self.num_hidden_layers))
        return ModelRecipe(layers, self.norm(), self.tie_word_embeddings)

    def _check_activation(self, name: str) -> None:
        given = getattr(self, name)
        if given not in self.activations:
            known = ", ".join(repr(each) for each in self.activations)
            raise ModelError(f"{name} {given!r} is not supported; supported: {known}")

    def _check_shared(self) -> None:
        if self.per_layer_config is not None and not self.layers_differ:
            raise ModelError("per_layer_config, settings of single layers, is not supported")
        if not self.is_causal:
            raise ModelError("is_causal has to be true: tokens that see later ones are not supported")
        given = (self.rope_scaling, self.rope_parameters)
        kinds = (kind for own in given if own for kind in (own.full_attention, own.sliding_attention))
        for own in (self, *given, *kinds):
            if own is not None and own.partial_rotary_factor not in (None, 1.0) and not self.partly_turned:
                raise ModelError("partial_rotary_factor, positions in a part of each head, is not supported")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ModelError(f"{self.num_attention_heads} heads cannot share {self.hidden_size} hidden channels")
        if self.head_size() % 2:
            raise ModelError(f"a head of {self.head_size()} channels is not supported; their number has to be even")
        self._check_turned(self.turned_channels())

    def _check_turned(self, turned: int | None) -> None:
        if turned is not None and (turned % 2 or not 0 < turned <= self.head_size()):
            raise ModelError(f"{turned} of {self.head_size()} channels of a head cannot be turned; an even number can")


def windows_of(
    given: Sequence[str] | None, usual: Sequence[str], layers: int, window: int | None
) -> tuple[int | None, ...]:
    """Returns each layer's window by ``layer_types``, which is ``given``, or by the ``usual`` kinds without it.

    Raises ModelError if the kinds are unknown, or not as many as ``layers``, or if a kind lacks its window.
    """
    kinds = usual if given is None else given
    check_layer_types(kinds, layers, FULL, SLIDING)
    if window is None and SLIDING in kinds:
        raise ModelError(f"there are layers with {SLIDING!r}, but no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def growing(given: RotarySettings) -> QueryScale:
    """Returns by how much queries grow with their positions. Raises ModelError if the settings do not say it."""
    beta, step = given.llama_4_scaling_beta, given.original_max_position_embeddings
    if beta is None or step is None:
        raise ModelError("rope_parameters need llama_4_scaling_beta and original_max_position_embeddings")
    return QueryScale(beta, step)


def rotary_of(
    given: RotarySettings, theta: float, max_positions: int, width: int | None = None, interleaved: bool = False
) -> Rotary:
    """Returns the frequencies, with ``theta`` if ``given`` has none. Raises ModelError for an unsupported scaling."""
    kind = given.rope_type or given.type or "default"
    original = given.original_max_position_embeddings or max_positions
    scaling: LinearScaling | YarnScaling | Llama3Scaling | LongScaling | PartialScaling | None
    match kind:
        case "default":
            scaling = None
        case "dynamic":
            # It changes frequencies only beyond max_position_embeddings, where no context gets.
            _needed(given.factor, "factor", kind)
            scaling = None
        case "linear":
            scaling = LinearScaling(_needed(given.factor, "factor", kind))
        case "yarn":
            scaling = YarnScaling(
                factor=_needed(given.factor, "factor", kind),
                original_positions=original,
                beta_fast=given.beta_fast or 32.0,
                beta_slow=given.beta_slow or 1.0,
                truncate=given.truncate,
                attention_factor=given.attention_factor,
                mscale=given.mscale,
                mscale_all_dim=given.mscale_all_dim,
            )
        case "llama3":
            scaling = Llama3Scaling(
                factor=_needed(given.factor, "factor", kind),
                low_freq_factor=_needed(given.low_freq_factor, "low_freq_factor", kind),
                high_freq_factor=_needed(given.high_freq_factor, "high_freq_factor", kind),
                original_positions=original,
            )
        case "proportional":
            part = 1.0 if given.partial_rotary_factor is None else given.partial_rotary_factor
            scaling = PartialScaling(part, 1.0 if given.factor is None else _needed(given.factor, "factor", kind))
        case "longrope" | "su":
            if given.short_factor is None or given.long_factor is None:
                raise ModelError(f"rotary scaling {kind!r} needs short_factor and long_factor")
            factor = given.attention_factor
            if factor is None:
                factor = _long_factor(max_positions, original, given.factor)
            scaling = LongScaling(tuple(given.short_factor), tuple(given.long_factor), original, factor)
        case _:
            raise ModelError(f"rotary scaling {kind!r} is not supported")
    # A scaling that leaves some channels as they are says itself which.
    width = None if isinstance(scaling, PartialScaling) else width
    return Rotary(theta if given.rope_theta is None else given.rope_theta, scaling, (), width, interleaved)


def _long_factor(max_positions: int, original: int, factor: float | None) -> float:
    """Returns the factor of cosines and sines for contexts beyond ``original`` (Ding et al., 2024)."""
    ratio = max_positions / original if factor is None else factor
    return 1.0 if ratio <= 1.0 else math.sqrt(1 + math.log(ratio) / math.log(original))


def _needed(value: float | None, name: str, kind: str) -> float:
    if value is None or value <= 0:
        raise ModelError(f"rotary scaling {kind!r} needs a positive {name}")
    return value
