"""Reads the shape of a decoder from a Hugging Face ``config.json`` or from a GGUF file's header."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ModelError
from pdserve.models.checkpoint.family_settings import (
    SETTINGS,
    ExpertSettings,
    LlamaSettings,
    Rotary,
    settings_from_json,
)
from pdserve.models.checkpoint.gguf_config import gguf_biases, gguf_settings, rotary_divisors
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf
from pdserve.models.checkpoint.quantisation import refuse_unknown_quantisation

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GEMMA3 = frozenset({"gemma3_text"})
GEMMA3_WITH_IMAGES = "gemma3"
MOE = frozenset({"qwen3_moe"})
FAMILIES = frozenset(SETTINGS)
"""``model_type`` values that have a decoder of their own here; ``hf_decoder`` takes others."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What every decoder needs to know."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    """The factor of the attention scores."""
    norm_eps: float
    biases: frozenset[str]
    """The names of the projections that have a bias, like ``q_proj``."""
    head_norms: bool
    """Whether the queries and keys of each head are normalised."""
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    """The number of tokens that each layer sees, including the newest; None for a layer that sees all."""
    max_positions: int
    eos_token_ids: frozenset[int]
    rotary: Rotary
    """The rotary frequencies of the layers that see all."""
    window_rotary: Rotary
    """The rotary frequencies of the layers that see a window; only a Gemma 3 has others for them."""
    experts: ExpertSettings | None


@dataclass(frozen=True, slots=True)
class OutsideConfig(DecoderConfig):
    """A model outside ``FAMILIES``, which transformers computes from ``hf``.

    Of the other fields, only those that the KV cache and the scheduler read have a meaning.
    """

    hf: PretrainedConfig


class _Header(msgspec.Struct):
    """The settings that say how to read the others."""

    model_type: str | None = None
    layer_types: object = None
    configuration_files: object = None


class _Gemma3WithImages(msgspec.Struct):
    """The settings of a Gemma 3 that takes images. Some that concern its text part are outside of that part's."""

    text_config: msgspec.Raw = msgspec.Raw(b"{}")
    tie_word_embeddings: bool | None = True
    eos_token_id: int | list[int] | None = None


def read_decoder_config(path: Path) -> DecoderConfig:
    """Reads a folder's ``config.json`` (and ``generation_config.json`` for end-of-sequence ids), or a GGUF header.

    Raises ModelError if it is missing or malformed, or names a family that cannot be computed exactly.
    """
    if is_gguf(path):
        file = read_gguf(path)
        family, settings = gguf_settings(file)
        config = _decoder_config(family, settings, path)
        divisors = rotary_divisors(file)
        return replace(
            config,
            biases=config.biases | gguf_biases(file),
            rotary=replace(config.rotary, divisors=divisors),
            window_rotary=replace(config.window_rotary, divisors=divisors),
        )
    found = _family_and_text(path)
    if found is None:
        # This import loads what transformers needs to read a configuration: about 3 s, which other families do without.
        from pdserve.models.checkpoint.fallback_config import read_outside_config

        outside = read_outside_config(path)
        return replace(outside, eos_token_ids=_eos_token_ids(getattr(outside.hf, "eos_token_id", None), path))
    family, text = found
    refuse_unknown_quantisation(path)
    try:
        settings = _gemma3_text_settings(text) if family == GEMMA3_WITH_IMAGES else settings_from_json(family, text)
    except ModelError as exc:
        raise ModelError(f"{path}/config.json is not a {family} model's: {exc}") from exc
    family = "gemma3_text" if family == GEMMA3_WITH_IMAGES else family
    config = _decoder_config(family, settings, path)
    return replace(config, eos_token_ids=_eos_token_ids(settings.eos_token_id, path))


def _gemma3_text_settings(text: bytes) -> LlamaSettings:
    """Returns the settings of the text part. Raises ModelError if one has a value that it cannot have."""
    try:
        whole = msgspec.json.decode(text, type=_Gemma3WithImages)
    except msgspec.DecodeError as exc:
        raise ModelError(str(exc)) from exc
    settings = settings_from_json("gemma3_text", whole.text_config)
    settings.tie_word_embeddings = bool(whole.tie_word_embeddings)
    if whole.eos_token_id is not None:
        settings.eos_token_id = whole.eos_token_id
    return settings


def has_own_decoder(path: Path) -> bool:
    """Returns whether the configuration can be read without loading transformers, which takes seconds."""
    return is_gguf(path) or _family_and_text(path) is not None


def _family_and_text(folder: Path) -> tuple[str, bytes] | None:
    """Returns the family and the JSON text of its settings; None if transformers has to read the file."""
    try:
        text = (folder / "config.json").read_bytes()
        header = msgspec.json.decode(text, type=_Header)
    except (OSError, msgspec.DecodeError):
        return None
    if header.model_type == GEMMA3_WITH_IMAGES:
        return GEMMA3_WITH_IMAGES, text
    if header.model_type not in FAMILIES or header.configuration_files is not None:
        return None
    if header.model_type == "mistral" and header.layer_types is not None:
        # transformers takes it for a Ministral.
        return None
    return header.model_type, text


def _decoder_config(family: str, settings: LlamaSettings, path: Path) -> DecoderConfig:
    heads = settings.num_attention_heads
    try:
        settings.check()
        return DecoderConfig(
            family=family,
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_layers=settings.num_hidden_layers,
            heads=heads,
            kv_heads=settings.num_key_value_heads or heads,
            head_dim=settings.head_size(),
            attention_scale=settings.attention_scale(),
            norm_eps=settings.rms_norm_eps,
            biases=settings.biases(),
            head_norms=settings.head_norms,
            tied_embeddings=settings.tie_word_embeddings,
            windows=settings.windows(),
            max_positions=settings.max_position_embeddings,
            eos_token_ids=_ids(settings.eos_token_id),
            rotary=settings.rotary(),
            window_rotary=settings.window_rotary(),
            experts=settings.experts(),
        )
    except ModelError as exc:
        raise ModelError(f"the model in {path} cannot be served: {exc}") from exc


class _Generation(msgspec.Struct):
    """What is read of a ``generation_config.json``."""

    eos_token_id: int | list[int] | None = None


TOKEN_RULES = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
    *("sequence_bias", "no_repeat_ngram_size", "repetition_penalty", "min_length", "min_new_tokens", "stop_strings"),
)
"""The settings of a ``generation_config.json`` by which greedy answers differ, too, and which requests have here."""


def _eos_token_ids(own: int | list[int] | None, folder: Path) -> frozenset[int]:
    """Returns the ids of ``generation_config.json``, or ``own``, those of the configuration, if it has none."""
    path = folder / "generation_config.json"
    if not path.exists():
        return _ids(own)
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        generation = msgspec.convert(values, _Generation)
    except (OSError, msgspec.DecodeError) as exc:
        raise ModelError(f"{path} cannot be read: {exc}") from exc
    if rules := [f"{name} {values[name]}" for name in TOKEN_RULES if values.get(name) not in (None, 0, 1, [], {})]:
        log.warning("%s has %s, which no answer follows: requests say how to sample", path, ", ".join(rules)[:200])
    return _ids(own if generation.eos_token_id is None else generation.eos_token_id)


def _ids(ids: int | list[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
