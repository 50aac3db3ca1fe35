"""Reads a model's vocabulary in the form in which grammars are compiled for it.

To read one takes a third of a second for 49,152 tokens, in which no other thread of the process runs, and some 50 MiB.
So an engine reads it while it loads its weights (that of a GGUF file with the first grammar), and once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from pdserve.errors import ModelError
from pdserve.models.checkpoint.cached_tokenizer import read_tokenizer
from pdserve.models.checkpoint.gguf_file import is_gguf


def load_vocabulary(model_dir: Path, eos_token_ids: Sequence[int], cache_dir: Path | None = None) -> LLTokenizer:
    """Returns the vocabulary of a Hugging Face folder or of a GGUF file, whose tokenizer may be in ``cache_dir``.

    An answer with a grammar ends with one of ``eos_token_ids``, where the grammar lets it end. Raises ModelError.
    """
    if not eos_token_ids:
        raise ModelError("the model has no end-of-sequence token, so that no answer with a grammar could end")
    try:
        tokenizer, ends = _tokenizer_json(model_dir, cache_dir), list(eos_token_ids)
        # An empty list of slices would save a fifth of the time, and make masks slower.
        vocabulary = LLTokenizer(tokenizer, eos_token=ends)
        added = _added_decoder.decode(tokenizer).added_tokens
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot read the tokenizer in {model_dir} for grammars: {exc}") from exc
    texts = _texts({token.content.encode() for token in added if not token.special}, vocabulary) - set(ends)
    return _with_texts(vocabulary, texts, ends) if texts else vocabulary


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


_added_decoder = msgspec.json.Decoder(_AddedTokens)


class _SpelledOut:
    """The tokens of a vocabulary, in the form in which llguidance takes them one by one."""

    def __init__(self, vocabulary: LLTokenizer, texts: Collection[int]) -> None:
        """``texts`` are the tokens that are texts, though the vocabulary has them as special tokens."""
        ids = range(vocabulary.vocab_size)
        self.eos_token_id = vocabulary.eos_token
        self.bos_token_id = None
        self.tokens = [vocabulary.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [one for one in ids if vocabulary.is_special_token(one) and one not in texts]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.tokenize_bytes(text)


def _texts(contents: Collection[bytes], vocabulary: LLTokenizer) -> set[int]:
    """Returns the tokens with these contents that the vocabulary has as special ones. It has its own view of ids."""
    if not contents:
        return set()
    special = filter(vocabulary.is_special_token, range(vocabulary.vocab_size))
    return {token_id for token_id in special if vocabulary.decode_bytes([token_id]) in contents}


def _with_texts(vocabulary: LLTokenizer, texts: Collection[int], ends: Sequence[int]) -> LLTokenizer:
    """Returns the vocabulary with ``texts`` as tokens that a grammar's letters match.

    llguidance takes each added token with angle brackets around it for a special one. Qwen's ``<tool_call>`` and
    ``<think>`` are texts, as their files say: what a grammar spells out has to match the token that the model writes.
    """
    return LLTokenizer(TokenizerWrapper(_SpelledOut(vocabulary, texts)), eos_token=list(ends))


def _tokenizer_json(model_dir: Path, cache_dir: Path | None) -> str:
    if is_gguf(model_dir):
        return read_tokenizer(model_dir, cache_dir).backend
    return (model_dir / "tokenizer.json").read_text(encoding="utf-8")
