"""Takes the text of one chat answer apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.api.message.parts import CallPiece, MessageParts, PartsBuilder
from pdserve.api.message.reasoning import ReasoningParser

SLICE = 4_096
"""How many characters are read at once. A parser moves what it has not read yet with each step that it takes."""


class PartsParser(Protocol):
    """Takes what is no reasoning apart, or all of an answer in a format that has reasoning anywhere."""

    calls: int
    """How many calls have begun."""

    @property
    def unread(self) -> int:
        """How many of the last characters it has not taken yet."""

    @property
    def undecided(self) -> int:
        """How many of the last characters may still become content."""

    def add(self, text: str, parts: PartsBuilder) -> None:
        """Tells ``parts`` what ``text`` adds to the message."""

    def finish(self, parts: PartsBuilder) -> None:
        """Tells ``parts`` what was held back, when no more text follows."""


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Some content, as it stands in the text of an answer."""

    start: int
    text: str


class _ContentPieces(PartsBuilder):
    """Notes where content stands in the text."""

    def __init__(self, end: Callable[[], int]) -> None:
        """``end`` returns where the content ends that is reported now."""
        super().__init__()
        self.pieces: list[ContentPiece] = []
        self._end = end

    def content(self, text: str) -> None:
        if text:
            self.pieces.append(ContentPiece(self._end() - len(text), text))


class MessageParser:
    """Splits one answer into reasoning, content and calls. What it has reported of a text depends on the text alone."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: PartsParser | None,
        *,
        show_reasoning: bool = True,
        tells_calls: bool = True,
    ) -> None:
        """``tells_calls`` says whether an answer with calls has a finish reason of its own."""
        self._reasoning = reasoning
        self._calls = calls
        self._show_reasoning = show_reasoning
        self._tells_calls = tells_calls
        self._length = 0
        """How long the text is so far."""

    @property
    def called(self) -> bool:
        """Whether the finish reason says that the message has calls."""
        return self._tells_calls and self._calls is not None and self._calls.calls > 0

    def add(self, text: str) -> MessageParts:
        """Returns what ``text`` adds to the message."""
        parts = PartsBuilder()
        for start in range(0, len(text), SLICE):
            self._add(text[start : start + SLICE], parts)
        return self._shown(parts)

    def finish(self) -> MessageParts:
        """Returns what was held back, when no more text follows."""
        parts = PartsBuilder()
        self._finish(parts)
        return self._shown(parts)

    def _finish(self, parts: PartsBuilder) -> None:
        if self._reasoning is not None:
            self._add_content(self._reasoning.finish(parts), parts)
        if self._calls is not None:
            self._calls.finish(parts)

    def content(self, text: str) -> list[ContentPiece]:
        """Does what ``add`` does, and returns the content that ``text`` adds."""
        parts = _ContentPieces(self._read_end)
        for start in range(0, len(text), SLICE):
            self._add(text[start : start + SLICE], parts)
        return parts.pieces

    def rest_of_content(self) -> list[ContentPiece]:
        """Does what ``finish`` does, and returns the content that was held back."""
        parts = _ContentPieces(self._read_end)
        self._finish(parts)
        return parts.pieces

    @property
    def decided(self) -> int:
        """How much of the text is known to be content, or to be none."""
        waiting = 0 if self._reasoning is None else self._reasoning.undecided
        return self._length - waiting - (0 if self._calls is None else self._calls.undecided)

    def _read_end(self) -> int:
        """Returns where the content ends that is reported now. All that follows has not been read yet."""
        return self._length - (0 if self._calls is None else self._calls.unread)

    def _add(self, text: str, parts: PartsBuilder) -> None:
        self._length += len(text)
        self._add_content(text if self._reasoning is None else self._reasoning.add(text, parts), parts)

    def _add_content(self, text: str, parts: PartsBuilder) -> None:
        if self._calls is None:
            parts.content(text)
        elif text:
            self._calls.add(text, parts)

    def _shown(self, builder: PartsBuilder) -> MessageParts:
        parts = builder.parts()
        return parts if self._show_reasoning or not parts.reasoning else _without_reasoning(parts)


def _without_reasoning(parts: MessageParts) -> MessageParts:
    order = [piece for piece in parts.order if isinstance(piece, CallPiece) or not piece.thought]
    return MessageParts(parts.content, "", parts.calls, tuple(order) if len(order) > 1 else ())
