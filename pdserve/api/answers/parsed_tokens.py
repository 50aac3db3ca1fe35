"""Finds the tokens of which the content of a parsed answer is made, among those of its reasoning and calls.

The text is parsed token by token. What a parser shows with a token is made of that token and, where the parser had
held text back, of those before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.api.answers.logprobs import ShownToken
from pdserve.api.message.message_parser import MessageParser
from pdserve.api.message.parts import MessageParts


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token, and the text that a delta has of it."""

    token: ShownToken
    text: str


def cut_at_tokens(text: str, start: int, tokens: Sequence[ShownToken]) -> list[TokenPiece]:
    """Returns ``text``, before which the answer has ``start`` characters, cut between ``tokens``."""
    starts = [min(max(token.offset - start, 0), len(text)) for token in tokens[1:]]
    bounds = [0, *starts, len(text)]
    return [TokenPiece(token, text[bounds[at] : bounds[at + 1]]) for at, token in enumerate(tokens)]


class ParsedTokens:
    """The tokens of one choice, as far as they are parsed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[ShownToken, int]] = []
        """The tokens of which nothing is shown yet, and how many characters each of them has."""
        self._content: list[ShownToken] = []
        self._runs: list[int] = []
        """How many tokens each run of content has, since the last call of ``take``. Calls stand between runs."""
        self._gap = True

    def read(self, piece: TokenPiece, parser: MessageParser) -> MessageParts:
        """Gives the text of one token to ``parser`` and returns what that shows."""
        self._waiting.append((piece.token, len(piece.text)))
        parts = parser.add(piece.text)
        self.shown(parts)
        return parts

    def shown(self, parts: MessageParts) -> None:
        """Notes what a parser shows of the tokens that it has read."""
        if parts.content:
            tokens = list(self._last(len(parts.content)))
            self._content += reversed(tokens)
            if self._gap:
                self._runs.append(0)
            self._runs[-1] += len(tokens)
            self._gap = False
        self._gap |= bool(parts.calls or parts.reasoning)
        if parts.content or parts.reasoning or parts.calls:
            self._waiting = []

    def take(self) -> tuple[list[ShownToken], list[int]]:
        """Returns the tokens of the content that was shown since the last call, and how many each run of it has."""
        taken = self._content, self._runs
        self._content, self._runs, self._gap = [], [], True
        return taken

    def _last(self, chars: int) -> Iterator[ShownToken]:
        """Yields the last of the waiting tokens that have so many characters, and those without text before them."""
        for token, length in reversed(self._waiting):
            if chars <= 0 and length:
                return
            chars -= length
            yield token
