"""The shape of a decoder, read from a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from pdserve.errors import ModelError

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""``model_type`` values that ``llama.LlamaDecoder`` computes exactly."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a Llama-family decoder needs to know; ``hf`` keeps the whole original for rotary scaling."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    """Multiplies the scores."""
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: frozenset[int]
    hf: PretrainedConfig


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Read ``folder/config.json`` (and ``generation_config.json`` for end-of-sequence ids).

    Raises ModelError if it is missing, malformed, or of a family that cannot be computed exactly.
    """
    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as exc:
        raise ModelError(f"{folder} is not a readable Hugging Face model folder: {exc}") from exc
    if hf.model_type not in FAMILIES:
        raise ModelError(f"model_type {hf.model_type!r} of {folder} is not supported; these are: {sorted(FAMILIES)}")
    if hf.hidden_act != "silu":
        raise ModelError(f"hidden_act {hf.hidden_act!r} of {folder} is not supported; only 'silu' is")
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
        attention_scale=head_dim**-0.5,
        norm_eps=hf.rms_norm_eps,
        tied_embeddings=bool(hf.tie_word_embeddings),
        max_positions=_max_positions(hf),
        eos_token_ids=_eos_token_ids(hf, folder),
        hf=hf,
    )


def _max_positions(hf: PretrainedConfig) -> int:
    window = getattr(hf, "sliding_window", None)
    if window and getattr(hf, "use_sliding_window", True):
        # Within its first window, sliding attention and full attention are the same.
        return int(min(hf.max_position_embeddings, window))
    return int(hf.max_position_embeddings)


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
