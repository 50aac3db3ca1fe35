"""What is known of a decoder before its weights are read. ``config_reading`` reads it from a model's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.models.checkpoint.family_settings import SETTINGS, ExpertSettings, Rotary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GEMMA3 = frozenset({"gemma3_text"})
MOE = frozenset({"qwen3_moe"})
FAMILIES = frozenset(SETTINGS)
"""``model_type`` values that have a decoder of their own here; transformers computes others."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the KV cache and the scheduler need to know of every decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    """The factor of the attention scores."""
    windows: tuple[int | None, ...]
    """The number of tokens that each layer sees, including the newest; None for a layer that sees all."""
    max_positions: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class FamilyConfig(DecoderConfig):
    """A model of one of ``FAMILIES``, with what its decoder here needs to know."""

    intermediate_size: int
    norm_eps: float
    biases: frozenset[str]
    """The names of the projections that have a bias, like ``q_proj``."""
    head_norms: bool
    """Whether the queries and keys of each head are normalised."""
    tied_embeddings: bool
    rotary: Rotary
    """The rotary frequencies of the layers that see all."""
    window_rotary: Rotary
    """The rotary frequencies of the layers that see a window; only a Gemma 3 has others for them."""
    experts: ExpertSettings | None


@dataclass(frozen=True, slots=True)
class FallbackConfig(DecoderConfig):
    """A fallback model: one outside ``FAMILIES``, which transformers computes from ``hf``."""

    hf: PretrainedConfig
