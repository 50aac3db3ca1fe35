"""A model that writes at random what a grammar allows, in the demo model's vocabulary."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from pdserve.api.call_grammars.tool_grammar import tool_grammar
from pdserve.api.message.parts import MessageParts, joined
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.grammars.compiling import compile_grammar, load_vocabulary
from tests.api.call_grammars.test_tool_grammar import EOS

MAX_TOKENS = 150
ENDS = ('"', ")", "]", "}", ",", "\n", "<", "</", '"}', '")', "])", ")]", "parameter", ">", "function", "tool", "think")
"""What ends values. The model likes it, because it likes short answers."""


class RandomModel:
    """Writes random texts of grammars."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        """``folder`` has the tokenizer's file."""
        self._tokenizer = tokenizer
        self._vocabulary = load_vocabulary(folder, [EOS])
        ends = [tokenizer.encode(text, add_special_tokens=False)[0] for text in ENDS]
        self._ends = np.array(sorted({EOS, *ends}))

    def write(self, asked: AnswerReading, rng: random.Random, begun: str = "") -> tuple[list[str], bool]:
        """Returns the pieces of an answer that begins so, and whether it came to its end."""
        matcher = self._matcher(asked, {})
        first = self._tokenizer.encode(begun, add_special_tokens=False)
        assert matcher.consume_tokens(first), begun
        rest, ended = self._walk(matcher, rng)
        return self._pieces(first + rest), ended

    def mimic(self, asked: AnswerReading, script: str, rng: random.Random, specials: Mapping[str, int]) -> str | None:
        """Returns an answer that comes as near to the script as its grammar allows; None if it has no end.

        Markers that are ``specials`` come as special tokens, now and then.
        """
        matcher, tokens = self._matcher(asked, specials), list[int]()
        while script:
            marker = next((text for text in specials if script.startswith(text) and rng.random() < 0.5), None)
            piece = marker or script[:1]
            wanted = [specials[marker]] if marker else self._tokenizer.encode(piece, add_special_tokens=False)
            if matcher.validate_tokens(wanted) == len(wanted):
                assert matcher.consume_tokens(wanted)
                tokens += wanted
            script = script[len(piece) :]
        rest, ended = self._walk(matcher, rng)
        text = "".join(self._pieces(tokens + rest))
        for marker, token_id in specials.items():
            text = text.replace(self._tokenizer.token_strings([token_id])[0], marker)
        return text if ended else None

    def _matcher(self, asked: AnswerReading, specials: Mapping[str, int]) -> LLMatcher:
        grammar = tool_grammar(asked, "", specials.get)
        assert grammar is not None
        return compile_grammar(grammar, self._vocabulary).matcher

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> tuple[list[int], bool]:
        """Returns the tokens up to the end, and whether that came."""
        written: list[int] = []
        while len(written) < MAX_TOKENS:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            assert bits.any(), written
            ends = self._ends[bits[self._ends] == 1]
            allowed = ends if len(ends) and rng.random() < 0.7 else np.flatnonzero(bits)
            token = int(allowed[rng.randrange(len(allowed))])
            if token == EOS:
                return written, True
            assert matcher.consume_token(token)
            written.append(token)
        return written, False

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text as its tokens come."""
        reader = self._tokenizer.detokenizer(skip_special_tokens=False)
        return [*(reader.add([token]) for token in tokens), reader.flush()]


def read(asked: AnswerReading, pieces: Sequence[str]) -> MessageParts:
    """Returns the message that a text is read as."""
    parser = asked.parser("")
    assert parser is not None
    return joined([*map(parser.add, pieces), parser.finish()])
