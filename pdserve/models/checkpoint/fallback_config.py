"""Reads the shape of a fallback model with transformers, which computes it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch._meta_registrations  # noqa: F401  # see lean_torch: it has to come before transformers' quantisers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FallbackConfig
from pdserve.models.checkpoint.model_files import plain_json
from pdserve.models.checkpoint.safetensors.quantisation import refuse_unknown_quantisation
from pdserve.models.families.settings import FULL, SLIDING
from pdserve.models.served import not_yet
from pdserve.models.table import FAMILIES

STATES = ("state_size", "ssm_state_size", "mamba_d_state")
"""The settings that only models with state spaces have."""
LAYER_WORDS = {
    "linear_attention": "linear attention",
    "mamba": "state spaces",
    "recurrent": "recurrent states",
    "conv": "convolutions",
    "chunked_attention": "chunked attention",
    "indexed_attention": "sparse attention",
    "minimax_m3_sparse": "sparse attention",
    "compressed_sparse_attention": "sparse attention",
    "heavily_compressed_attention": "sparse attention",
    "hybrid": "state spaces or convolutions beside their attention",
    "hybrid_sliding": "state spaces or convolutions beside their attention",
}
"""What a kind of layer that cannot be served is called, for the kinds that transformers names otherwise."""


def read_fallback_config(folder: Path) -> FallbackConfig:
    """Returns what the KV cache and the scheduler need to know, without end-of-sequence ids. Raises ModelError."""
    _refuse_what_is_not_yet_served(folder)
    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as exc:
        raise ModelError(f"{folder} is not a readable Hugging Face model folder: {exc}") from exc
    except Exception as exc:
        # The code of a configuration divides, looks up and compares its settings, whatever they are.
        raise ModelError(
            f"the settings in {folder}/config.json do not fit together: {type(exc).__name__}: {exc}"
        ) from exc
    refuse_unknown_quantisation(folder, AUTO_QUANTIZATION_CONFIG_MAPPING)
    _check_kind(hf, folder)
    try:
        if other := _unlike_attention(hf):
            raise ModelError(other)
        return _fallback_config(hf)
    except ModelError as exc:
        raise ModelError(f"a {hf.model_type} model cannot be served: {exc}") from exc


class _Kind(msgspec.Struct):
    """The settings that say which family a model, or the text model within it, belongs to."""

    model_type: str = ""
    text_config: _Kind | None = None


def _refuse_what_is_not_yet_served(folder: Path) -> None:
    """Raises ModelError for a family of which it is known what it lacks. Files that cannot be read tell nothing."""
    try:
        kind = msgspec.json.decode(plain_json((folder / "config.json").read_bytes()), type=_Kind)
    except (OSError, msgspec.DecodeError):
        return
    for each in (kind, kind.text_config):
        if each is not None and (missing := not_yet(each.model_type)):
            raise ModelError(f"a {each.model_type} model cannot be served: {missing}")


def _check_kind(hf: PretrainedConfig, folder: Path) -> None:
    """Raises ModelError for a model that is not a decoder of text alone."""
    if hf.is_encoder_decoder:
        raise ModelError(f"a {hf.model_type} model cannot be served: it has an encoder beside its decoder")
    text: PretrainedConfig = hf.get_text_config(decoder=True)
    if text is not hf:
        kind = f"a {text.model_type} model (text_config in {folder}/config.json)"
        served = text.model_type in FAMILIES
        raise ModelError(
            f"a {hf.model_type} model, which takes more than text, cannot be served: the text model within it is "
            f"{kind}, {'and has to be in a folder of its own' if served else 'which has no recipe'}"
        )
    if hf.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"model_type {hf.model_type!r} of {folder} is not supported; these are: {sorted(FAMILIES)}, and decoders "
            "that transformers computes through its attention interface (pdserve models --families)"
        )
    # The classes of these models compute both an encoder and a decoder, and this setting says which one it is.
    if hf.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(hf, "is_decoder", False):
        raise ModelError(
            f"a {hf.model_type} model cannot be served: it is an encoder, which reads a text and does not continue it "
            f"(is_decoder in {folder}/config.json)"
        )


def _unlike_attention(hf: PretrainedConfig) -> str:
    """Says what a model has in place of attention over keys and values, or beside it; nothing if it has none."""
    if _has(hf, "kv_lora_rank"):
        return "it has latent attention (kv_lora_rank)"
    if found := next((name for name in STATES if _has(hf, name)), ""):
        return f"it has state spaces ({found})"
    kinds = {*(_setting(hf, "layer_types") or ()), *(_setting(hf, "layers_block_type") or ())} - {FULL, SLIDING}
    if kinds:
        words = sorted({LAYER_WORDS.get(kind, str(kind)) for kind in kinds})
        return f"it has layers with {', '.join(words)} (layer_types)"
    if hf.sub_configs and _setting(hf, "num_attention_heads") is None:
        return f"it is made of several models ({', '.join(sorted(hf.sub_configs))})"
    return ""


def _fallback_config(hf: PretrainedConfig) -> FallbackConfig:
    heads, hidden_size, layers = (
        _count(hf, name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    head_dim = _setting(hf, "head_dim") or hidden_size // heads
    if not isinstance(head_dim, int) or head_dim < 1:
        raise ModelError(f"{heads} heads cannot share {hidden_size} hidden channels")
    return FallbackConfig(
        family=hf.model_type,
        vocab_size=_count(hf, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=layers,
        heads=heads,
        kv_heads=heads if _setting(hf, "num_key_value_heads") is None else _count(hf, "num_key_value_heads"),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_cap=None,
        windows=(None,) * layers,
        max_positions=_count(hf, "max_position_embeddings"),
        eos_token_ids=frozenset(),
        hf=hf,
    )


def _setting(hf: PretrainedConfig, name: str) -> Any:
    """Returns a setting, or None if there is none. Raises ModelError if its layers differ in it."""
    try:
        return getattr(hf, name, None)
    except RuntimeError as exc:
        raise ModelError(f"its layers differ in {name}, which has to be the same in all of them") from exc


def _has(hf: PretrainedConfig, name: str) -> bool:
    """Returns whether a setting is there and not zero, in at least one layer."""
    try:
        return bool(getattr(hf, name, None))
    except RuntimeError:
        return True


def _count(hf: PretrainedConfig, name: str) -> int:
    found = _setting(hf, name)
    if found is None and name == "max_position_embeddings":
        raise ModelError(
            "its configuration has no max_position_embeddings, as models have whose positions are relative"
        )
    if not isinstance(found, int) or found < 1:
        raise ModelError(f"its configuration has {'no ' + name if found is None else f'{name} {found!r}'}")
    return found
