"""Words that an answer must not hold, as the runs of tokens that the engine keeps out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from pdserve.api.tokenizer import Tokenizer

TokenRuns: TypeAlias = tuple[tuple[int, ...], ...]


def bad_word_tokens(words: Iterable[str], tokenizer: Tokenizer) -> TokenRuns:
    """Each word as it is, and as it comes after a space. The same word cut into other tokens is not kept out."""
    runs = []
    for word in words:
        for form in (word, " " + word.lstrip()):
            runs.append(tuple(tokenizer.encode(form, add_special_tokens=False)))
    return tuple(dict.fromkeys(run for run in runs if run))
