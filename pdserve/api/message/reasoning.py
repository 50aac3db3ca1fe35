"""Splits what a model thinks from what it says: ``<think>…</think>`` before the content.

``ReasoningTokens`` counts its tokens by their own bytes, and not by the shown text, which stop strings hold back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.api.message.call_parser import MAX_BLANK, begins, find_marker
from pdserve.api.message.parts import PartsBuilder


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What stands around the reasoning of a model."""

    opening: str
    closing: str
    opening_token: str = ""
    """The beginning of ``opening`` for which a vocabulary may have a token; empty if that is all of it."""

    @property
    def tokens(self) -> tuple[str, str]:
        """The texts for which a vocabulary may have tokens."""
        return self.opening_token or self.opening, self.closing


THINK = ReasoningMarkers("<think>", "</think>")
MISTRAL_THINK = ReasoningMarkers("[THINK]", "[/THINK]")
GEMMA4_THINK = ReasoningMarkers("<|channel>thought", "<channel|>", "<|channel>")


class ReasoningStart(enum.Enum):
    """Where an answer begins, as its prompt ends."""

    BEFORE = "before"
    """Reasoning may come, with its marker."""
    INSIDE = "inside"
    """The prompt has the marker already."""
    BEHIND = "behind"
    """The prompt has ended the reasoning already."""


class ReasoningParser:
    """Takes the reasoning of one message away, with the spaces at its beginning and before the content behind it."""

    def __init__(self, markers: ReasoningMarkers, start: ReasoningStart) -> None:
        self._markers = markers
        self._waiting = ""
        self._over = False
        self._spaces = ""
        """The spaces before the opening marker, which are content if it does not come."""
        inside = start is ReasoningStart.INSIDE
        self._state: Callable[[PartsBuilder], str | None] = self._gap_before if inside else self._before

    def add(self, text: str, parts: PartsBuilder) -> str:
        """Tells ``parts`` the reasoning in ``text``. Returns what is content of it."""
        self._waiting += text
        content = []
        while self._waiting and (piece := self._state(parts)) is not None:
            content.append(piece)
        return "".join(content)

    def finish(self, parts: PartsBuilder) -> str:
        """Tells ``parts`` what was held back, when no more text follows. Returns what is content of it."""
        self._over = True
        content = self.add("", parts)
        return self._flush_spaces() + content

    @property
    def undecided(self) -> int:
        """How many of the last characters may still become content."""
        return len(self._spaces) + len(self._waiting) if self._state == self._before else 0

    def _before(self, parts: PartsBuilder) -> str | None:
        if spaces := self._take_spaces():
            self._spaces += spaces
            if len(self._spaces) > MAX_BLANK:
                self._state = self._content
                return self._flush_spaces()
            return ""
        begun = begins(self._waiting, self._markers.opening)
        if begun is None and not self._over:
            return None
        if begun:
            self._take(len(self._markers.opening))
            self._spaces, self._state = "", self._gap_before
            return ""
        self._state = self._content
        return self._flush_spaces()

    def _gap_before(self, parts: PartsBuilder) -> str | None:
        if self._take_spaces():
            return ""
        # A prompt that opens the reasoning has a marker which some models write once more.
        begun = begins(self._waiting, self._markers.opening)
        if begun is None and not self._over:
            return None
        if begun:
            self._take(len(self._markers.opening))
            return ""
        self._state = self._inside
        return ""

    def _inside(self, parts: PartsBuilder) -> str | None:
        start, marker = find_marker(self._waiting, (self._markers.closing,))
        if self._over and not marker:
            start = len(self._waiting)
        if start:
            parts.reasoning(self._take(start))
        if marker:
            self._take(len(marker))
            self._state = self._gap_behind
            return ""
        return None

    def _gap_behind(self, parts: PartsBuilder) -> str | None:
        if not self._take_spaces():
            self._state = self._content
        return ""

    def _content(self, parts: PartsBuilder) -> str | None:
        return self._take(len(self._waiting))

    def _flush_spaces(self) -> str:
        spaces, self._spaces = self._spaces, ""
        return spaces

    def _take_spaces(self) -> str:
        return self._take(len(self._waiting) - len(self._waiting.lstrip()))

    def _take(self, count: int) -> str:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


class _Phase(enum.Enum):
    BEFORE = "before"
    """The opening marker may come."""
    INSIDE = "inside"
    OVER = "over"


class TokenCount(Protocol):
    """Counts the tokens with which an answer thinks."""

    count: int

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""


class ReasoningTokens:
    """Counts the tokens of one answer from the opening marker of its reasoning to the closing one, both included."""

    def __init__(self, markers: ReasoningMarkers, start: ReasoningStart, token_bytes: Callable[[int], bytes]) -> None:
        """``token_bytes`` returns the bytes of one token by itself."""
        self._opening, self._closing = markers.opening.encode(), markers.closing.encode()
        self._token_bytes = token_bytes
        self._phase = _Phase.INSIDE if start is ReasoningStart.INSIDE else _Phase.BEFORE
        self._read = b""
        """Before the reasoning, all bytes so far; inside, the last ones, which may begin the closing marker."""
        self._waiting = 0
        """The tokens before the reasoning, which count if it comes."""
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        if self._phase is _Phase.OVER:
            return
        for token_id in token_ids:
            self._read += self._token_bytes(token_id)
            self._phase = self._before() if self._phase is _Phase.BEFORE else self._inside()
            if self._phase is _Phase.OVER:
                return

    def _before(self) -> _Phase:
        self._waiting += 1
        begun = self._read.lstrip()
        if len(self._read) - len(begun) > MAX_BLANK:
            return _Phase.OVER
        if begun.startswith(self._opening):
            self._read, self.count = begun[len(self._opening) :], self._waiting - 1
            return self._inside()
        return _Phase.BEFORE if self._opening.startswith(begun) else _Phase.OVER

    def _inside(self) -> _Phase:
        self.count += 1
        if self._closing in self._read:
            return _Phase.OVER
        self._read = self._read[1 - len(self._closing) :]
        return _Phase.INSIDE
