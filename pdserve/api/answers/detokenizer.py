"""Turns token ids into text while they come, without ever decoding all output again.

The pieces that ``add`` and ``flush`` return, put together, are what decoding all ids at once gives. A character whose
bytes are spread over several tokens is held back until it is complete.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD = 3
"""A character has at most four bytes, so an incomplete one at most three tokens."""


MAX_TEXTLESS = 16
"""How many tokens without text are decoded with the next one. Where there are more, none are."""


class Detokenizer(Protocol):
    """Turns the tokens of one output into text."""

    def add(self, token_ids: Iterable[int]) -> str:
        """Returns the text that is certain now, which may be empty."""

    def flush(self) -> str:
        """Returns the text that was held back, if no more tokens follow. It changes nothing."""


def _byte_of_char() -> dict[str, int]:
    """Returns the byte of each character of byte-level BPE: bytes that are not printable Latin-1 are U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a token as a byte-level vocabulary (GPT-2's kind) writes it."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token is plain text, not in the byte alphabet
        return token.encode()


def piece_bytes(token: str) -> bytes:
    """Returns the bytes of a token as a vocabulary of pieces (SentencePiece's kind) writes it."""
    if byte := _BYTE_PIECE.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace("\u2581", " ").encode()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a vocabulary, filled in as tokens are first seen."""

    def __init__(self, token_of_id: Callable[[int], str | None], bytes_of: Callable[[str], bytes]) -> None:
        super().__init__()
        self._token_of_id = token_of_id
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._bytes_of(self._token_of_id(token_id) or "")
        return value


class BytesDetokenizer:
    """The detokenizer of byte-level vocabularies (GPT-2's kind, most models today), whose tokens are exactly bytes."""

    def __init__(self, token_bytes: TokenBytes, skip: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join([self._token_bytes[i] for i in token_ids if i not in self._skip]))

    def flush(self) -> str:
        held, _ = self._decoder.getstate()
        return held.decode("utf-8", "replace")


class WindowDetokenizer:
    """Detokenizes every other vocabulary (SentencePiece's kind), where a token's text depends on the token before it.

    It decodes the last tokens with text (``window[:settled]``, known) and the new ones together, and returns what the
    new ones add. Skipped ids never enter the window: one with no text at its start would let the decoder take the next
    token for the first of the output and strip its space. A run of byte tokens that is no UTF-8 may show one
    replacement character fewer than decoding at once, where part of the run was shown already.
    """

    def __init__(self, decode: Callable[[list[int]], str], skip: frozenset[int]) -> None:
        self._decode = decode
        self._skip = skip
        self._window: list[int] = []
        self._settled = 0
        self._settled_text = ""
        self._with_text = 1
        """The number of tokens of the window up to the last one that had text; at least 1."""

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join([self._add_one(i) for i in token_ids if i not in self._skip])

    def flush(self) -> str:
        return self._decode(self._window)[len(self._settled_text) :] if len(self._window) > self._settled else ""

    def _add_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._settled <= MAX_HELD:
            return ""
        return self._settle(text)

    def _settle(self, text: str) -> str:
        new = text[len(self._settled_text) :]
        if new:
            self._window = self._window[self._settled :]
            self._settled_text = self._decode(self._window)
            self._with_text = len(self._window)
        else:
            self._settled_text = text
            if len(self._window) > self._with_text + MAX_TEXTLESS:
                del self._window[self._with_text :]
                self._settled_text = self._decode(self._window)
        self._settled = len(self._window)
        return new
