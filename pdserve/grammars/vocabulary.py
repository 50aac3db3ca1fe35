"""Reads a model's vocabulary in the form in which grammars are compiled for it.

To read one takes a third of a second for 49,152 tokens, in which no other thread of the process runs, and some 50 MiB.
So an engine reads it while it loads its weights (that of a GGUF file with the first grammar), and once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf_file import is_gguf


def load_vocabulary(model_dir: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Returns the vocabulary of a Hugging Face folder or of a GGUF file.

    An answer with a grammar ends with one of ``eos_token_ids``, where the grammar lets it end. Raises ModelError.
    """
    if not eos_token_ids:
        raise ModelError("the model has no end-of-sequence token, so that no answer with a grammar could end")
    try:
        # An empty list of slices would save a fifth of the time, and make masks slower.
        return LLTokenizer(_tokenizer_json(model_dir), eos_token=list(eos_token_ids))
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot read the tokenizer in {model_dir} for grammars: {exc}") from exc


def _tokenizer_json(model_dir: Path) -> str:
    if is_gguf(model_dir):
        # Imported here: transformers takes half a second, and a Hugging Face folder does not need it.
        from pdserve.models.checkpoint.gguf_tokenizer import gguf_tokenizer

        return str(gguf_tokenizer(model_dir).backend_tokenizer.to_str())
    return (model_dir / "tokenizer.json").read_text(encoding="utf-8")
