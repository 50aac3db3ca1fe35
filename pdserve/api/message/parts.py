"""What a piece of an answer's text adds to the message: reasoning, content, and pieces of tool calls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class CallPiece(msgspec.Struct, frozen=True, gc=False):
    """What is new of one tool call."""

    index: int
    """The number of the call within the message."""
    name: str | None
    """The function's name, in the first piece of a call; None in all others."""
    arguments: str
    """The next characters of the arguments, which are a JSON object."""


class MessageParts(msgspec.Struct, frozen=True):
    """What is new of one message."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    """At most one piece of each call."""


class PartsBuilder:
    """Puts together what one piece of text adds."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._names: dict[int, str | None] = {}
        """The calls that have pieces, and the names that these had."""
        self._arguments: dict[int, list[str]] = {}

    def content(self, text: str) -> None:
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def call(self, index: int, name: str | None, arguments: str) -> None:
        self._names.setdefault(index, name)
        self._arguments.setdefault(index, []).append(arguments)

    def add(self, parts: MessageParts) -> None:
        if parts.content:
            self._content.append(parts.content)
        if parts.reasoning:
            self._reasoning.append(parts.reasoning)
        for piece in parts.calls:
            self.call(piece.index, piece.name, piece.arguments)

    def parts(self) -> MessageParts:
        calls = tuple(CallPiece(index, name, "".join(self._arguments[index])) for index, name in self._names.items())
        return MessageParts("".join(self._content), "".join(self._reasoning), calls)


def joined(parts: Sequence[MessageParts]) -> MessageParts:
    """Returns consecutive parts of one message as one."""
    builder = PartsBuilder()
    for part in parts:
        builder.add(part)
    return builder.parts()
