"""Takes the text of one chat answer apart."""

from __future__ import annotations

from pdserve.api.message.call_parser import CallParser
from pdserve.api.message.parts import MessageParts, PartsBuilder
from pdserve.api.message.reasoning import ReasoningParser

SLICE = 4_096
"""How many characters are read at once. A parser moves what it has not read yet with each step that it takes."""


class MessageParser:
    """Splits one answer into reasoning, content and calls. What it has told of a text depends on the text alone."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: CallParser | None,
        *,
        show_reasoning: bool = True,
        tells_calls: bool = True,
    ) -> None:
        """``tells_calls`` says whether an answer with calls has a finish reason of its own."""
        self._reasoning = reasoning
        self._calls = calls
        self._show_reasoning = show_reasoning
        self._tells_calls = tells_calls

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
        if self._reasoning is not None:
            self._add_content(self._reasoning.finish(parts), parts)
        if self._calls is not None:
            self._calls.finish(parts)
        return self._shown(parts)

    def _add(self, text: str, parts: PartsBuilder) -> None:
        self._add_content(text if self._reasoning is None else self._reasoning.add(text, parts), parts)

    def _add_content(self, text: str, parts: PartsBuilder) -> None:
        if self._calls is None:
            parts.content(text)
        elif text:
            self._calls.add(text, parts)

    def _shown(self, builder: PartsBuilder) -> MessageParts:
        parts = builder.parts()
        return parts if self._show_reasoning else MessageParts(parts.content, "", parts.calls)
