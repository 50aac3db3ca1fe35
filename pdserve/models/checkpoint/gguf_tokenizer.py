"""Reads the tokenizer and the chat template of a GGUF file.

transformers rebuilds the tokenizer; its own reader of the file is not used, because it imports torch, which the API
process can do without.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf_file import GgufFile, read_gguf

SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
PARTS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "add_prefix_space": "add_space_prefix",
}
"""transformers' names for what the file calls ``tokenizer.ggml.…``."""


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer. Raises ModelError if the file holds none that transformers can rebuild."""
    file = read_gguf(path)
    metadata = file.metadata
    parts = {name: metadata[key] for name, part in PARTS.items() if (key := f"tokenizer.ggml.{part}") in metadata}
    # The module has no types, and its package loads it lazily.
    conversion: Any = importlib.import_module("transformers.integrations.gguf")
    build: Any = PreTrainedTokenizerFast
    try:
        backend, settings = conversion.convert_gguf_tokenizer(file.architecture, parts)
        tokenizer: PreTrainedTokenizerFast = build(tokenizer_object=backend, **settings, **_settings(file))
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise ModelError(f"cannot read the tokenizer in {path}: {exc}") from exc
    return tokenizer


def _settings(file: GgufFile) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens", list)
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in SPECIAL.items()}
    # llama.cpp begins a sentencepiece prompt with BOS where the file says nothing.
    sentencepiece = file.get("tokenizer.ggml.model", str) == "llama"
    return {
        **{name: tokens[token_id] for name, token_id in found.items() if isinstance(token_id, int)},
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", bool, sentencepiece),
        "add_eos_token": file.get("tokenizer.ggml.add_eos_token", bool, False),
        "chat_template": file.get("tokenizer.chat_template", str, ""),
    }
