"""What a piece of an answer's text adds to the message: reasoning, content, and pieces of tool calls."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeAlias

import msgspec


class CallPiece(msgspec.Struct, frozen=True, gc=False):
    """What is new of one tool call."""

    index: int
    """The number of the call within the message."""
    name: str | None
    """The function's name, in the first piece of a call; None in all others."""
    arguments: str
    """The next characters of the arguments, which are a JSON object."""


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """Content, or reasoning, that comes in a row."""

    text: str
    thought: bool = False
    """Whether it is reasoning."""


Piece: TypeAlias = TextPiece | CallPiece


class MessageParts(msgspec.Struct, frozen=True):
    """What is new of one message."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    """At most one piece of each call."""
    order: Sequence[Piece] = ()
    """All of it in the order in which it came; empty if it is one piece, or nothing."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """All of it in its order."""
        if self.order:
            return self.order
        texts = ((self.reasoning, True), (self.content, False))
        return (*(TextPiece(text, thought) for text, thought in texts if text), *self.calls)


class _Kind(enum.Enum):
    CONTENT = enum.auto()
    REASONING = enum.auto()


class PartsBuilder:
    """Puts together what one piece of text adds."""

    def __init__(self) -> None:
        self._names: dict[int, str | None] = {}
        """The calls that have pieces, and the names that these had."""
        self._order: list[tuple[int | _Kind, list[str]]] = []
        """The texts of each piece, behind its kind, which for a call is its number."""

    def content(self, text: str) -> None:
        if text:
            self._add_to(_Kind.CONTENT, text)

    def reasoning(self, text: str) -> None:
        if text:
            self._add_to(_Kind.REASONING, text)

    def call(self, index: int, name: str | None, arguments: str) -> None:
        self._names.setdefault(index, name)
        self._add_to(index, arguments)

    def add(self, parts: MessageParts) -> None:
        for piece in parts.pieces:
            if isinstance(piece, CallPiece):
                self.call(piece.index, piece.name, piece.arguments)
            elif piece.thought:
                self.reasoning(piece.text)
            else:
                self.content(piece.text)

    def parts(self) -> MessageParts:
        order = self._order
        if len(order) == 1 and order[0][0] is _Kind.CONTENT:
            return MessageParts("".join(order[0][1]))
        texts: dict[int | _Kind, list[str]] = {}
        for kind, pieces in order:
            texts.setdefault(kind, []).extend(pieces)
        calls = tuple(CallPiece(index, name, "".join(texts[index])) for index, name in self._names.items())
        content, reasoning = (texts.get(kind, ()) for kind in (_Kind.CONTENT, _Kind.REASONING))
        return MessageParts("".join(content), "".join(reasoning), calls, self._ordered() if len(order) > 1 else ())

    def _add_to(self, kind: int | _Kind, text: str) -> None:
        if not self._order or self._order[-1][0] != kind:
            self._order.append((kind, []))
        self._order[-1][1].append(text)

    def _ordered(self) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        named = set[int]()
        for kind, texts in self._order:
            text = "".join(texts)
            if isinstance(kind, _Kind):
                pieces.append(TextPiece(text, kind is _Kind.REASONING))
            else:
                pieces.append(CallPiece(kind, None if kind in named else self._names[kind], text))
                named.add(kind)
        return tuple(pieces)


def joined(parts: Sequence[MessageParts]) -> MessageParts:
    """Returns consecutive parts of one message as one."""
    builder = PartsBuilder()
    for part in parts:
        builder.add(part)
    return builder.parts()
