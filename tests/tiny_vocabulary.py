"""Makes the tokenizer of the tiny models' 512 tokens: every byte, and some pairs of letters, so that grammars have
something to choose from.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from llguidance import LLTokenizer

from pdserve.grammars.compiling import load_vocabulary
from tests.tiny_models import VOCAB_SIZE

SPECIAL = ("<pad>", "<s>", "</s>")
EOS = 2
FIRST_BYTE = len(SPECIAL)
LETTERS = "abcdefghijklmnop"


def _visible_bytes() -> list[str]:
    """Returns the characters by which byte-level vocabularies write each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def save_tiny_tokenizer(folder: Path) -> None:
    """Saves the tokenizer in the folder of a tiny model."""
    pairs = [first + second for first in LETTERS for second in LETTERS]
    tokens = [*SPECIAL, *_visible_bytes(), *pairs][:VOCAB_SIZE]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    state = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token} | plain for i, token in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(state))


@cache
def tiny_vocabulary(folder: Path) -> LLTokenizer:
    """Returns the vocabulary for grammars. ``folder`` is a folder for its file."""
    save_tiny_tokenizer(folder)
    return load_vocabulary(folder, [EOS])


def tiny_text(tokens: list[int]) -> str:
    """Returns the text of tokens without the special ones."""
    pieces = [
        bytes([token - FIRST_BYTE])
        if token < FIRST_BYTE + 256
        else (LETTERS[(token - FIRST_BYTE - 256) // 16] + LETTERS[(token - FIRST_BYTE - 256) % 16]).encode()
        for token in tokens
        if token >= FIRST_BYTE
    ]
    return b"".join(pieces).decode()
