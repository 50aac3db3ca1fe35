"""Small random models of every supported family, as ordinary Hugging Face folders, and their reference answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Large enough that the logits of a random model differ well beyond rounding.
    "initializer_range": 0.4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-scaled": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
}


def save_tiny_model(family: str, folder: Path, **shape: int) -> Path:
    """Write a random model of ``family`` to ``folder``; the same every time. ``shape`` overrides parts of ``SHAPE``."""
    torch.manual_seed(sum(family.encode()))
    auto: Any = AutoModelForCausalLM
    config = type(FAMILIES[family]).from_dict(FAMILIES[family].to_dict() | shape)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """fp32 logits ``[tokens, vocab]`` of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
