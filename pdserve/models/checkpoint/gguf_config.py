"""Translates the metadata of a GGUF file into the settings of a Hugging Face configuration."""

from __future__ import annotations

import struct
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.checkpoint.family_settings import LlamaSettings, settings_from_values
from pdserve.models.checkpoint.gguf_file import GgufFile

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""transformers' name of an architecture for each name that GGUF has."""

READ = frozenset(
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
READ_OF_GEMMA3 = frozenset(
    {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa"}
)
WITHOUT_EFFECT = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})

ROTARY_DIVISORS = "rope_freqs.weight"
"""The tensor with the divisor of each rotary frequency: Llama 3's scaling, in numbers."""

GEMMA3_PATTERN = 6
"""Every sixth layer of a Gemma 3 sees everything; the format has no key for it."""
GEMMA3_LOCAL_BASE = 10_000.0
GEMMA3_27B_LAYERS = 62
"""The layers of the only Gemma 3 whose queries are not scaled by their width; the format has no key for the scale."""


def gguf_settings(file: GgufFile) -> tuple[str, LlamaSettings]:
    """Returns the file's family and settings.

    Raises ModelError for an architecture, or a setting of one, that is not known to be computed exactly.
    """
    arch = file.architecture
    if arch not in MODEL_TYPES:
        raise ModelError(
            f"{file.path} holds a model of architecture {arch!r}; as GGUF files these work: {sorted(MODEL_TYPES)}"
        )
    read = READ | READ_OF_GEMMA3 if arch == "gemma3" else READ
    known = {f"{arch}.{key}" for key in read | WITHOUT_EFFECT | _windows_without_effect(file)}
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
        "rope_parameters": _rotary(file),
    }
    if arch == "gemma3":
        settings |= _gemma3(file, settings)
    try:
        return MODEL_TYPES[arch], settings_from_values(MODEL_TYPES[arch], settings)
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
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    names |= {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
    return frozenset(name for part, name in names.items() if f"blk.0.{part}.bias" in file.tensors)


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'")
    return embedding.shape[0]


def _end_of_sequence(file: GgufFile) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return sorted({file.get(key, int) for key in keys if key in file.metadata})


def _rotary(file: GgufFile) -> dict[str, Any]:
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


def _gemma3(file: GgufFile, settings: dict[str, Any]) -> dict[str, Any]:
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
