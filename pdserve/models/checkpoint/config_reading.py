"""Reads the shape of a decoder from a Hugging Face ``config.json`` or from a GGUF file's header.

A header's metadata is translated into the settings of a Hugging Face configuration first.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from pdserve.errors import ModelError
from pdserve.models.checkpoint.composite import text_settings, within_whole
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.models.checkpoint.gguf_file import GgufFile, is_gguf, read_gguf
from pdserve.models.checkpoint.model_files import refuse_unknown_quantisation
from pdserve.models.families.settings import MLP, QKVO, FamilySettings
from pdserve.models.recipe import ExpertsRecipe, LayerRecipe
from pdserve.models.table import COMPOSITES, FAMILIES, settings_from_json, settings_from_values

log = logging.getLogger(__name__)

GGUF_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""transformers' name of an architecture for each name that GGUF has."""

GGUF_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)
GGUF_KEYS_OF_GEMMA3 = frozenset(
    {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa"}
)
GGUF_KEYS_WITHOUT_EFFECT = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})

ROTARY_DIVISORS = "rope_freqs.weight"
"""The tensor with the divisor of each rotary frequency: Llama 3's scaling, in numbers."""

GEMMA3_PATTERN = 6
"""Every sixth layer of a Gemma 3 sees everything; the format has no key for it."""
GEMMA3_LOCAL_BASE = 10_000.0
GEMMA3_27B_LAYERS = 62
"""The layers of the only Gemma 3 whose queries are not scaled by their width; the format has no key for the scale."""


class _Header(msgspec.Struct):
    """The settings that say how to read the others."""

    model_type: str | None = None
    layer_types: object = None
    configuration_files: object = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A ``config.json`` of a model that has a recipe."""

    family: str
    text: bytes


def read_decoder_config(path: Path) -> DecoderConfig:
    """Reads a folder's ``config.json`` (and ``generation_config.json`` for end-of-sequence ids), or a GGUF header.

    Raises ModelError if it is missing or malformed, or names a family that cannot be computed exactly.
    """
    if is_gguf(path):
        return _of_gguf_file(path)
    found = _found(path)
    if found is not None:
        return _of_folder(path, found)
    # This import loads what transformers needs to read a configuration: about 3 s, which other families do without.
    from pdserve.models.checkpoint.fallback_config import read_fallback_config

    fallback = read_fallback_config(path)
    return replace(fallback, eos_token_ids=_eos_token_ids(getattr(fallback.hf, "eos_token_id", None), path))


def read_family_config(path: Path) -> FamilyConfig:
    """Reads the configuration of a model that has a decoder here, as ``read_decoder_config`` does.

    Raises ModelError for a fallback model, too.
    """
    if is_gguf(path):
        return _of_gguf_file(path)
    found = _found(path)
    if found is None:
        raise ModelError(f"the model in {path} is computed by transformers; it is none of {sorted(FAMILIES)}")
    return _of_folder(path, found)


def _of_gguf_file(path: Path) -> FamilyConfig:
    file = read_gguf(path)
    family, settings = gguf_settings(file)
    config = _family_config(family, settings, path)
    biases, divisors = gguf_biases(file), rotary_divisors(file)
    layers = tuple(_of_gguf(layer, biases, divisors) for layer in config.recipe.layers)
    return replace(config, recipe=replace(config.recipe, layers=layers))


def _of_folder(path: Path, found: _Found) -> FamilyConfig:
    refuse_unknown_quantisation(path)
    family, composite = found.family, found.family in COMPOSITES
    try:
        if composite:
            family, settings = text_settings(found.text)
        else:
            settings = settings_from_json(family, found.text)
    except ModelError as exc:
        raise ModelError(f"the {found.family} model in {path} cannot be served: {exc}") from exc
    config = _family_config(family, settings, path)
    recipe = within_whole(config.recipe) if composite else config.recipe
    return replace(config, recipe=recipe, eos_token_ids=_eos_token_ids(settings.eos_token_id, path))


def has_own_decoder(path: Path) -> bool:
    """Returns whether the configuration can be read without loading transformers, which takes seconds."""
    return is_gguf(path) or _found(path) is not None


def _found(folder: Path) -> _Found | None:
    """Reads the ``config.json``. Returns None if transformers has to read it."""
    try:
        text = (folder / "config.json").read_bytes()
        header = msgspec.json.decode(text, type=_Header)
    except (OSError, msgspec.DecodeError):
        return None
    family = header.model_type
    if family in COMPOSITES:
        return _Found(family, text)
    if family not in FAMILIES or header.configuration_files is not None:
        return None
    if family == "mistral" and header.layer_types is not None:
        # transformers takes it for one, too.
        family = "ministral"
    try:
        if settings_from_json(family, text).left_to_transformers():
            return None
    except ModelError:
        # What is wrong is said where the settings are used.
        pass
    return _Found(family, text)


def _family_config(family: str, settings: FamilySettings, path: Path) -> FamilyConfig:
    heads = settings.num_attention_heads
    try:
        settings.check()
        return FamilyConfig(
            family=family,
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            num_layers=settings.num_hidden_layers,
            heads=heads,
            kv_heads=settings.kv_heads(),
            head_dim=settings.head_size(),
            attention_scale=settings.attention_scale(),
            attention_cap=settings.attention_cap(),
            windows=settings.windows(),
            max_positions=settings.max_position_embeddings,
            eos_token_ids=_ids(settings.eos_token_id),
            intermediate_size=settings.channels(),
            recipe=settings.recipe(),
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


# ------------------------------------------------------------ GGUF


def gguf_settings(file: GgufFile) -> tuple[str, FamilySettings]:
    """Returns the file's family and settings.

    Raises ModelError for an architecture, or a setting of one, that is not known to be computed exactly.
    """
    arch = file.architecture
    if arch not in GGUF_MODEL_TYPES:
        raise ModelError(
            f"{file.path} holds a model of architecture {arch!r}; as GGUF files these work: {sorted(GGUF_MODEL_TYPES)}"
        )
    read = GGUF_KEYS | GGUF_KEYS_OF_GEMMA3 if arch == "gemma3" else GGUF_KEYS
    known = {f"{arch}.{key}" for key in read | GGUF_KEYS_WITHOUT_EFFECT | _windows_without_effect(file)}
    if unknown := sorted(key for key in file.metadata if key.startswith(f"{arch}.") and key not in known):
        raise ModelError(f"{file.path} has settings that are not supported: {', '.join(unknown[:5])}")
    hidden, heads = file.get(f"{arch}.embedding_length", int), file.get(f"{arch}.attention.head_count", int)
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden // heads if heads > 0 else 0)
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"{file.path} has {heads} heads of {head_dim} for {hidden} hidden channels")
    layers = file.get(f"{arch}.block_count", int)
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} has {layers} layers, but only {len(file.tensors)} tensors")
    for other in ("attention.value_length", "rope.dimension_count"):
        if (found := file.get(f"{arch}.{other}", int, head_dim)) != head_dim:
            raise ModelError(f"{arch}.{other} of {file.path} is {found}; only the head size, {head_dim}, is supported")
    settings: dict[str, Any] = {
        "vocab_size": _vocabulary(file),
        "hidden_size": hidden,
        "intermediate_size": file.get(f"{arch}.feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.get(f"{arch}.context_length", int),
        "rms_norm_eps": file.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _end_of_sequence(file),
        "rope_parameters": _gguf_rotary(file),
    }
    if arch == "gemma3":
        settings |= _gguf_gemma3(file, settings)
    try:
        return GGUF_MODEL_TYPES[arch], settings_from_values(GGUF_MODEL_TYPES[arch], settings)
    except ModelError as exc:
        raise ModelError(f"the settings in {file.path} do not fit together: {exc}") from exc


def rotary_divisors(file: GgufFile) -> tuple[float, ...]:
    """Returns the divisor of each rotary frequency, or an empty tuple if the file has no such tensor."""
    tensor = file.tensors.get(ROTARY_DIVISORS)
    if tensor is None:
        return ()
    if tensor.kind != 0 or len(tensor.shape) != 1:
        raise ModelError(f"{ROTARY_DIVISORS} of {file.path} is not a vector of fp32")
    size = 4 * tensor.shape[0]
    try:
        with file.path.open("rb") as data:
            data.seek(tensor.offset)
            return struct.unpack(f"<{tensor.shape[0]}f", data.read(size))
    except (OSError, struct.error) as exc:
        raise ModelError(f"{ROTARY_DIVISORS} of {file.path} cannot be read: {exc}") from exc


def _windows_without_effect(file: GgufFile) -> frozenset[str]:
    """Returns the key of the sliding window if no context is longer, or if it is 0, which stands for none."""
    key = "attention.sliding_window"
    window = file.get(f"{file.architecture}.{key}", int, 0)
    return frozenset({key} if not 0 < window < file.get(f"{file.architecture}.context_length", int) else ())


def gguf_biases(file: GgufFile) -> frozenset[str]:
    """Returns the names of the projections that have a bias, which the format says by its tensors alone."""
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj"}
    names |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    return frozenset(name for part, name in names.items() if f"blk.0.{part}.bias" in file.tensors)


def _of_gguf(layer: LayerRecipe, biases: frozenset[str], divisors: tuple[float, ...]) -> LayerRecipe:
    """Returns a layer with the biases and the frequencies that a file says by its tensors."""
    attention, mlp = layer.attention, layer.feed_forward
    assert attention.rotary is not None
    rotary = replace(attention.rotary, divisors=divisors)
    attention = replace(attention, rotary=rotary, biased=attention.biased | (biases & QKVO))
    if not isinstance(mlp, ExpertsRecipe):
        mlp = replace(mlp, biased=mlp.biased | (biases & MLP))
    return replace(layer, attention=attention, feed_forward=mlp)


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'")
    return embedding.shape[0]


def _end_of_sequence(file: GgufFile) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return sorted({file.get(key, int) for key in keys if key in file.metadata})


def _gguf_rotary(file: GgufFile) -> dict[str, Any]:
    arch = file.architecture
    factor = file.get(f"{arch}.rope.scaling.factor", float, 1.0)
    # A file that names a factor alone means this one, as llama.cpp reads it.
    kind = file.get(f"{arch}.rope.scaling.type", str, "none" if factor == 1.0 else "linear")
    if (attention := file.get(f"{arch}.rope.scaling.attn_factor", float, 1.0)) != 1.0:
        raise ModelError(f"{arch}.rope.scaling.attn_factor {attention} of {file.path} is not supported")
    parameters: dict[str, Any] = {"rope_theta": file.get(f"{arch}.rope.freq_base", float, 10_000.0)}
    if kind == "none":
        if factor != 1.0:
            raise ModelError(f"{arch}.rope.scaling.factor of {file.path} is {factor}, but its type is 'none'")
        return parameters | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"rotary scaling {kind!r} of {file.path} is not supported")
    parameters |= {"rope_type": kind, "factor": file.get(f"{arch}.rope.scaling.factor", float)}
    if kind == "yarn":
        original = file.get(f"{arch}.rope.scaling.original_context_length", int)
        parameters["original_max_position_embeddings"] = original
    return parameters


def _gguf_gemma3(file: GgufFile, settings: dict[str, Any]) -> dict[str, Any]:
    layers: int = settings["num_hidden_layers"]
    wide = settings["hidden_size"] // settings["num_attention_heads"]
    local = file.get("gemma3.rope.freq_base_swa", float, GEMMA3_LOCAL_BASE)
    return {
        "sliding_window": file.get("gemma3.attention.sliding_window", int),
        "layer_types": ["sliding_attention" if (i + 1) % GEMMA3_PATTERN else "full_attention" for i in range(layers)],
        "query_pre_attn_scalar": wide if layers == GEMMA3_27B_LAYERS else settings["head_dim"],
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        **{
            name: file.get(f"gemma3.{name}", float)
            for name in ("attn_logit_softcapping", "final_logit_softcapping")
            if f"gemma3.{name}" in file.metadata
        },
    }
