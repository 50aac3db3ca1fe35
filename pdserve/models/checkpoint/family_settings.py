"""Reads the settings of the families that have a decoder of their own, as a ``config.json`` has them.

What a file leaves out has the value that transformers gives it. transformers does not read the file itself, because it
loads parts of torch for that which take three seconds of every start; ``tests/models/test_family_settings.py`` compares
the two for each family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec

from pdserve.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_BIASES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
MLP_BIASES = frozenset({"gate_proj", "up_proj", "down_proj"})

Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies are divided by ``factor``, high ones stay, and those between are mixed (Peng et al., 2023)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by ``factor``, high ones stay, and those between are smoothed, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """The frequencies with which positions turn queries and keys."""

    theta: float
    scaling: LinearScaling | YarnScaling | Llama3Scaling | None = None
    divisors: tuple[float, ...] = ()
    """The divisor of each frequency; empty if none is divided."""


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """The experts of each layer in ``layers``. Each token is sent to ``chosen`` of ``count`` experts."""

    count: int
    chosen: int
    channels: int
    normalised: bool
    """Whether the weights of the chosen experts are scaled to a sum of one."""
    layers: frozenset[int]


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
    full_attention: RotarySettings | None = None
    sliding_attention: RotarySettings | None = None


class LlamaSettings(msgspec.Struct, kw_only=True):
    """The settings that all families share, with Llama's values for those that a file leaves out."""

    head_norms: ClassVar[bool] = False
    """Whether the queries and keys of each head are normalised."""

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
        if self.hidden_act != "silu":
            raise ModelError(f"hidden_act {self.hidden_act!r} is not supported; only 'silu' is")

    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def attention_scale(self) -> float:
        """Returns the factor of the attention scores."""
        return float(self.head_size() ** -0.5)

    def biases(self) -> frozenset[str]:
        """Returns the names of the projections that have a bias."""
        return (ATTENTION_BIASES if self.attention_bias else frozenset()) | (
            MLP_BIASES if self.mlp_bias else frozenset()
        )

    def windows(self) -> tuple[int | None, ...]:
        """Returns the number of tokens that each layer sees; None for a layer that sees all."""
        return (None,) * self.num_hidden_layers

    def rotary(self) -> Rotary:
        """Returns the frequencies of the layers that see all tokens."""
        empty = RotarySettings()
        chosen = self.rope_parameters or empty
        if self.rope_scaling is not None and self.rope_scaling != empty:
            chosen = self.rope_scaling
        if chosen.full_attention is not None or chosen.sliding_attention is not None:
            raise ModelError("rotary frequencies for each kind of layer are only supported in a Gemma 3")
        if self.original_max_position_embeddings is not None:
            chosen = msgspec.structs.replace(
                chosen, original_max_position_embeddings=self.original_max_position_embeddings
            )
        return _rotary(chosen, 10_000.0 if self.rope_theta is None else self.rope_theta, self.max_position_embeddings)

    def window_rotary(self) -> Rotary:
        """Returns the frequencies of the layers that see a window."""
        return self.rotary()

    def experts(self) -> ExpertSettings | None:
        return None

    def _check_shared(self) -> None:
        if self.per_layer_config is not None:
            raise ModelError("per_layer_config, settings of single layers, is not supported")
        if not self.is_causal:
            raise ModelError("is_causal has to be true: tokens that see later ones are not supported")
        given = (self.rope_scaling, self.rope_parameters)
        kinds = (kind for own in given if own for kind in (own.full_attention, own.sliding_attention))
        for own in (self, *given, *kinds):
            if own is not None and own.partial_rotary_factor not in (None, 1.0):
                raise ModelError("partial_rotary_factor, positions in a part of each head, is not supported")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ModelError(f"{self.num_attention_heads} heads cannot share {self.hidden_size} hidden channels")
        if self.head_size() % 2:
            raise ModelError(f"a head of {self.head_size()} channels is not supported; their number has to be even")


class MistralSettings(LlamaSettings, kw_only=True):
    """Every layer sees a window."""

    intermediate_size: Count = 14_336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 131_072
    sliding_window: Count | None = 4096

    def biases(self) -> frozenset[str]:
        return frozenset()

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers


class Qwen2Settings(LlamaSettings, kw_only=True):
    """The last layers see a window, or those that ``layer_types`` names, if ``use_sliding_window`` allows it."""

    vocab_size: Count = 151_936
    intermediate_size: Count = 22_016
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 32_768
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def biases(self) -> frozenset[str]:
        return ATTENTION_BIASES - {"o_proj"}

    def windows(self) -> tuple[int | None, ...]:
        window = self.sliding_window if self.use_sliding_window else None
        kinds = self.layer_types
        if kinds is None:
            first = self.num_hidden_layers if window is None else self.max_window_layers
            kinds = [SLIDING if i >= first else FULL for i in range(self.num_hidden_layers)]
        return _windows(kinds, self.num_hidden_layers, window)


class Qwen3Settings(Qwen2Settings, kw_only=True):
    """Qwen 3 has heads of 128 channels where a file does not say otherwise."""

    head_norms: ClassVar[bool] = True
    head_dim: Count | None = 128

    def biases(self) -> frozenset[str]:
        return ATTENTION_BIASES if self.attention_bias else frozenset()


class Qwen3MoeSettings(LlamaSettings, kw_only=True):
    """Most layers have experts, and every layer sees a window if ``use_sliding_window`` allows it."""

    head_norms: ClassVar[bool] = True
    vocab_size: Count = 151_936
    hidden_size: Count = 2048
    intermediate_size: Count = 6144
    num_hidden_layers: Count = 24
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32_768
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    num_experts: int = 128
    num_local_experts: int | None = None
    """What newer files call ``num_experts``."""
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None

    def biases(self) -> frozenset[str]:
        return ATTENTION_BIASES if self.attention_bias else frozenset()

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers

    def experts(self) -> ExpertSettings | None:
        count = self.num_experts if self.num_local_experts is None else self.num_local_experts
        step, dense = self.decoder_sparse_step, self.mlp_only_layers or []
        layers = frozenset(i for i in range(self.num_hidden_layers) if (i + 1) % step == 0 and i not in dense)
        if count <= 0:
            return None
        return ExpertSettings(count, self.num_experts_per_tok, self.moe_intermediate_size, self.norm_topk_prob, layers)


class Gemma3Settings(LlamaSettings, kw_only=True):
    """Every sixth layer sees everything, the others see a window and turn faster."""

    head_norms: ClassVar[bool] = True
    vocab_size: Count = 262_208
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 131_072
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 1
    query_pre_attn_scalar: Count = 256
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 6
    layer_types: list[str] | None = None
    rope_local_base_freq: float = 10_000.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False

    def check(self) -> None:
        self._check_shared()
        if self.hidden_activation != "gelu_pytorch_tanh":
            raise ModelError(
                f"hidden_activation {self.hidden_activation!r} is not supported; only 'gelu_pytorch_tanh' is"
            )
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if getattr(self, name):
                raise ModelError(f"{name} of a Gemma 3 is not supported")
        both = self.rope_parameters
        given = (self.rope_scaling, both) + ((both.full_attention, both.sliding_attention) if both else ())
        if any(own is not None and not own.truncate for own in given):
            # transformers reads it beside the settings of the kinds of layers, and not within them.
            raise ModelError("truncate: false in the rotary settings of a Gemma 3 is not supported")

    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    def biases(self) -> frozenset[str]:
        return ATTENTION_BIASES if self.attention_bias else frozenset()

    def windows(self) -> tuple[int | None, ...]:
        kinds = self.layer_types
        if kinds is None:
            numbers = range(1, self.num_hidden_layers + 1)
            kinds = [SLIDING if number % self.sliding_window_pattern else FULL for number in numbers]
        return _windows(kinds, self.num_hidden_layers, self.sliding_window)

    def rotary(self) -> Rotary:
        both = self.rope_parameters
        own = (RotarySettings(rope_type="default") if both is None else both.full_attention) or RotarySettings()
        if self.rope_scaling is not None:
            given = msgspec.structs.asdict(self.rope_scaling)
            own = msgspec.structs.replace(own, **{name: value for name, value in given.items() if value is not None})
        return _rotary(own, 1_000_000.0 if self.rope_theta is None else self.rope_theta, self.max_position_embeddings)

    def window_rotary(self) -> Rotary:
        own = None if self.rope_parameters is None else self.rope_parameters.sliding_attention
        return _rotary(own or RotarySettings(), self.rope_local_base_freq, self.max_position_embeddings)


SETTINGS: dict[str, type[LlamaSettings]] = {
    "llama": LlamaSettings,
    "mistral": MistralSettings,
    "qwen2": Qwen2Settings,
    "qwen3": Qwen3Settings,
    "qwen3_moe": Qwen3MoeSettings,
    "gemma3_text": Gemma3Settings,
}
"""The settings of each ``model_type`` that has a decoder of its own here."""


def settings_from_json(family: str, text: bytes | msgspec.Raw) -> LlamaSettings:
    """Reads a family's settings. Raises ModelError if one has a value that it cannot have."""
    try:
        return msgspec.json.decode(text, type=SETTINGS[family])
    except msgspec.DecodeError as exc:
        raise ModelError(str(exc)) from exc


def settings_from_values(family: str, values: dict[str, object]) -> LlamaSettings:
    """Takes a family's settings out of a dictionary. Raises ModelError if one has a value that it cannot have."""
    try:
        return msgspec.convert(values, SETTINGS[family])
    except msgspec.ValidationError as exc:
        raise ModelError(str(exc)) from exc


def _windows(kinds: Sequence[str], layers: int, window: int | None) -> tuple[int | None, ...]:
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise ModelError(f"layer_types must be one of {FULL!r} and {SLIDING!r} for each of {layers} layers")
    if window is None and SLIDING in kinds:
        raise ModelError(f"there are layers with {SLIDING!r}, but no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _rotary(given: RotarySettings, theta: float, max_positions: int) -> Rotary:
    """Returns the frequencies, with ``theta`` if ``given`` has none. Raises ModelError for an unsupported scaling."""
    kind = given.rope_type or given.type or "default"
    original = given.original_max_position_embeddings or max_positions
    scaling: LinearScaling | YarnScaling | Llama3Scaling | None
    match kind:
        case "default":
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
        case _:
            raise ModelError(f"rotary scaling {kind!r} is not supported")
    return Rotary(theta if given.rope_theta is None else given.rope_theta, scaling)


def _needed(value: float | None, name: str, kind: str) -> float:
    if value is None or value <= 0:
        raise ModelError(f"rotary scaling {kind!r} needs a positive {name}")
    return value
