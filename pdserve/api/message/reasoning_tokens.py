"""Counts the tokens with which a model thinks, whatever a client sees of them.

They are counted by their own bytes and not by the shown text, of which stop strings hold some back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from pdserve.api.message.markers import MAX_BLANK
from pdserve.api.message.reasoning import ReasoningMarkers, ReasoningStart


class _Phase(enum.Enum):
    BEFORE = "before"
    """The opening marker may come."""
    INSIDE = "inside"
    OVER = "over"


class ReasoningTokens:
    """Counts the tokens of one answer from the opening marker of its reasoning to the closing one, both included."""

    def __init__(self, markers: ReasoningMarkers, start: ReasoningStart, token_bytes: Callable[[int], bytes]) -> None:
        """``token_bytes`` returns the bytes of one token by itself."""
        self._opening, self._closing = markers.opening.encode(), markers.closing.encode()
        self._token_bytes = token_bytes
        self._phase = _Phase.INSIDE if start is ReasoningStart.INSIDE else _Phase.BEFORE
        self._seen = b""
        """Before the reasoning, all bytes so far; inside, the last ones, which may begin the closing marker."""
        self._waiting = 0
        """The tokens before the reasoning, which count if it comes."""
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        if self._phase is _Phase.OVER:
            return
        for token_id in token_ids:
            self._seen += self._token_bytes(token_id)
            self._phase = self._before() if self._phase is _Phase.BEFORE else self._inside()
            if self._phase is _Phase.OVER:
                return

    def _before(self) -> _Phase:
        self._waiting += 1
        begun = self._seen.lstrip()
        if len(self._seen) - len(begun) > MAX_BLANK:
            return _Phase.OVER
        if begun.startswith(self._opening):
            self._seen, self.count = begun[len(self._opening) :], self._waiting - 1
            return self._inside()
        return _Phase.BEFORE if self._opening.startswith(begun) else _Phase.OVER

    def _inside(self) -> _Phase:
        self.count += 1
        if self._closing in self._seen:
            return _Phase.OVER
        self._seen = self._seen[1 - len(self._closing) :]
        return _Phase.INSIDE
