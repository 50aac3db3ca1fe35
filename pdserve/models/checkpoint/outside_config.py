"""Reads the shape of a decoder outside ``FAMILIES`` with transformers, which computes it, too."""

from __future__ import annotations

from pathlib import Path

import torch._meta_registrations  # noqa: F401  # see lean_torch: it has to come before transformers' quantisers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FAMILIES, OutsideConfig
from pdserve.models.checkpoint.family_settings import Rotary
from pdserve.models.checkpoint.quantisation import refuse_unknown_quantisation


def read_outside_config(folder: Path) -> OutsideConfig:
    """Returns what the KV cache and the scheduler need to know, without end-of-sequence ids. Raises ModelError."""
    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as exc:
        raise ModelError(f"{folder} is not a readable Hugging Face model folder: {exc}") from exc
    refuse_unknown_quantisation(folder, AUTO_QUANTIZATION_CONFIG_MAPPING)
    _check(hf, folder)
    heads: int = hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    return OutsideConfig(
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
        biases=frozenset(),
        head_norms=False,
        tied_embeddings=bool(hf.tie_word_embeddings),
        windows=(None,) * hf.num_hidden_layers,
        max_positions=hf.max_position_embeddings,
        eos_token_ids=frozenset(),
        rotary=Rotary(1.0),
        window_rotary=Rotary(1.0),
        experts=None,
        hf=hf,
    )


def _check(hf: PretrainedConfig, folder: Path) -> None:
    if hf.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or hf.is_encoder_decoder:
        raise ModelError(
            f"model_type {hf.model_type!r} of {folder} is not supported; these are: {sorted(FAMILIES)}, and decoders "
            "that transformers computes through its attention interface"
        )
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    if missing := [name for name in needed if not isinstance(getattr(hf, name, None), int)]:
        raise ModelError(f"a {hf.model_type} model cannot be served: its configuration has no {', '.join(missing)}")
