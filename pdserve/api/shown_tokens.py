"""Which tokens the text that a client was shown is made of, so that their log probabilities go out with it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pdserve.wire.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of an answer."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int
    """Characters of the answer before the token's own."""


class ShownTokens:
    """Of one output, whose text is given token by token and shown later, from its beginning.

    A token without text of its own (part of a character, or a special token that is not shown) belongs to the next one
    that has some.
    """

    def __init__(self) -> None:
        self._length = 0
        self._textless: list[ShownToken] = []
        self._waiting: deque[tuple[int, ShownToken]] = deque()

    def add(self, token_id: int, logprobs: TokenLogprobs, text: str) -> None:
        """``text`` is what became certain with this token."""
        self._textless.append(ShownToken(token_id, logprobs, self._length))
        if text:
            self._length += len(text)
            self._waiting.extend((self._length, token) for token in self._textless)
            self._textless = []

    def take(self, shown: int) -> list[ShownToken]:
        """Those whose text lies within the first ``shown`` characters, each once."""
        taken = []
        while self._waiting and self._waiting[0][0] <= shown:
            taken.append(self._waiting.popleft()[1])
        return taken

    def take_last(self, shown: int, *, cut: bool) -> list[ShownToken]:
        """All that is left, when no more follows; of an answer that was cut, those that begin within what was shown."""
        left = [token for _, token in self._waiting] + self._textless
        self._waiting.clear()
        self._textless = []
        return [token for token in left if not cut or token.offset < shown]
