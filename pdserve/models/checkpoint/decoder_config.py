"""Reads the shape of a decoder from a Hugging Face ``config.json`` or from a GGUF file's header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf_config import gguf_config, rotary_divisors
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf

GEMMA3 = frozenset({"gemma3_text"})
GEMMA3_WITH_IMAGES = "gemma3"
MOE = frozenset({"qwen3_moe"})
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"}) | GEMMA3 | MOE
"""``model_type`` values that have a decoder of their own here; ``hf_decoder`` takes others."""


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_IN_EVERY_LAYER = frozenset({"mistral", "qwen3_moe"})


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What every decoder needs to know. ``hf`` is the whole configuration, for values that only some decoders need.

    For a model outside ``FAMILIES``, which transformers computes, only the fields that the KV cache and the scheduler
    read have a meaning.
    """

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
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    """The number of tokens that each layer sees, including the newest; None for a layer that sees all."""
    max_positions: int
    eos_token_ids: frozenset[int]
    rotary_divisors: tuple[float, ...]
    """The divisor of each rotary frequency; empty if none is divided."""
    hf: PretrainedConfig


def read_decoder_config(path: Path) -> DecoderConfig:
    """Reads a folder's ``config.json`` (and ``generation_config.json`` for end-of-sequence ids), or a GGUF header.

    Raises ModelError if it is missing or malformed, or names a family that cannot be computed exactly.
    """
    if is_gguf(path):
        file = read_gguf(path)
        hf = gguf_config(file)
        return _decoder_config(hf, path, frozenset(hf.eos_token_id), rotary_divisors(file))
    try:
        hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as exc:
        raise ModelError(f"{path} is not a readable Hugging Face model folder: {exc}") from exc
    if hf.model_type in FAMILIES:
        return _decoder_config(hf, path, _eos_token_ids(hf, path))
    if hf.model_type == GEMMA3_WITH_IMAGES:
        text: PretrainedConfig = hf.text_config
        return _decoder_config(text, path, _eos_token_ids(text, path))
    return _outside_config(hf, path, _eos_token_ids(hf, path))


def _decoder_config(
    hf: PretrainedConfig, folder: Path, eos_token_ids: frozenset[int], divisors: tuple[float, ...] = ()
) -> DecoderConfig:
    _check_activation(hf, folder)
    heads = hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    return DecoderConfig(
        family=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        attention_scale=(getattr(hf, "query_pre_attn_scalar", None) or head_dim) ** -0.5,
        norm_eps=hf.rms_norm_eps,
        tied_embeddings=bool(hf.tie_word_embeddings),
        windows=_windows(hf, folder),
        max_positions=int(hf.max_position_embeddings),
        eos_token_ids=eos_token_ids,
        rotary_divisors=divisors,
        hf=hf,
    )


def _outside_config(hf: PretrainedConfig, folder: Path, eos_token_ids: frozenset[int]) -> DecoderConfig:
    """Returns what the KV cache and the scheduler need to know of a decoder that transformers computes."""
    if hf.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or hf.is_encoder_decoder:
        raise ModelError(
            f"model_type {hf.model_type!r} of {folder} is not supported; these are: {sorted(FAMILIES)}, and decoders "
            "that transformers computes through its attention interface"
        )
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    if missing := [name for name in needed if not isinstance(getattr(hf, name, None), int)]:
        raise ModelError(f"a {hf.model_type} model cannot be served: its configuration has no {', '.join(missing)}")
    heads: int = hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    return DecoderConfig(
        family=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=0,
        num_layers=hf.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        norm_eps=0.0,
        tied_embeddings=bool(hf.tie_word_embeddings),
        windows=(None,) * hf.num_hidden_layers,
        max_positions=hf.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        rotary_divisors=(),
        hf=hf,
    )


def _check_activation(hf: PretrainedConfig, folder: Path) -> None:
    name, wanted = ("hidden_activation", "gelu_pytorch_tanh") if hf.model_type in GEMMA3 else ("hidden_act", "silu")
    if getattr(hf, name) != wanted:
        raise ModelError(f"{name} {getattr(hf, name)!r} of {folder} is not supported; only {wanted!r} is")


def _windows(hf: PretrainedConfig, folder: Path) -> tuple[int | None, ...]:
    """Returns each layer's window as transformers reads it: by the layer's kind if the architecture has kinds."""
    window: int | None = getattr(hf, "sliding_window", None)
    if hf.model_type in WINDOW_IN_EVERY_LAYER:
        return (window,) * int(hf.num_hidden_layers)
    kinds: list[str] = getattr(hf, "layer_types", None) or [FULL] * hf.num_hidden_layers
    if len(kinds) != hf.num_hidden_layers or not set(kinds) <= {FULL, SLIDING}:
        raise ModelError(f"layer_types of {folder} must be one of {FULL!r} and {SLIDING!r} for each layer")
    if window is None and SLIDING in kinds:
        raise ModelError(f"{folder} has layers with {SLIDING!r}, but no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _eos_token_ids(hf: PretrainedConfig, folder: Path) -> frozenset[int]:
    ids = hf.eos_token_id
    if (folder / "generation_config.json").exists():
        try:
            ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or ids
        except (OSError, ValueError) as exc:
            raise ModelError(f"{folder}/generation_config.json cannot be read: {exc}") from exc
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
