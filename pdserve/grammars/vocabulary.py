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
from pdserve.models.checkpoint.kept_tokenizer import read_tokenizer


def load_vocabulary(model_dir: Path, eos_token_ids: Sequence[int], cache_dir: Path | None = None) -> LLTokenizer:
    """Returns the vocabulary of a Hugging Face folder or of a GGUF file, whose tokenizer may be in ``cache_dir``.

    An answer with a grammar ends with one of ``eos_token_ids``, where the grammar lets it end. Raises ModelError.
    """
    if not eos_token_ids:
        raise ModelError("the model has no end-of-sequence token, so that no answer with a grammar could end")
    try:
        # An empty list of slices would save a fifth of the time, and make masks slower.
        return LLTokenizer(_tokenizer_json(model_dir, cache_dir), eos_token=list(eos_token_ids))
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot read the tokenizer in {model_dir} for grammars: {exc}") from exc


def _tokenizer_json(model_dir: Path, cache_dir: Path | None) -> str:
    if is_gguf(model_dir):
        return read_tokenizer(model_dir, cache_dir).backend
    return (model_dir / "tokenizer.json").read_text(encoding="utf-8")
