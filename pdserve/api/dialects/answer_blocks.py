"""Cuts an answer into blocks: pieces of text of one kind, of which a dialect shows the beginning and the end."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pdserve.api.answers.openai_response import ChatChoice, Completion, Usage
from pdserve.api.answers.text_generation import TextDelta
from pdserve.api.outcome import ChoiceOutcome


class BlockKind(enum.Enum):
    TEXT = "text"


@dataclass(slots=True)
class Block:
    """One block of an answer, as far as it has come."""

    kind: BlockKind
    index: int
    """Its place among the blocks of the answer."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended."""

    cut: bool
    """Whether the limit of tokens has ended it."""
    stop_string: str | None
    usage: Usage


class BlockEvents(Protocol):
    """Makes the events of one answer."""

    def begin(self) -> list[msgspec.Struct]:
        """Returns what precedes all blocks."""

    def open(self, block: Block) -> list[msgspec.Struct]:
        """Returns the beginning of ``block``."""

    def piece(self, block: Block, text: str) -> msgspec.Struct:
        """Returns what shows the next ``text`` of ``block``."""

    def close(self, block: Block, *, cut: bool) -> list[msgspec.Struct]:
        """Returns the end of ``block``. ``cut`` says whether the limit of tokens has ended it."""

    def end(self, blocks: Sequence[Block], end: AnswerEnd) -> list[msgspec.Struct]:
        """Returns what follows all blocks."""


class AnswerBlocks:
    """The blocks of one streamed answer, which are the same however the answer is cut into deltas."""

    def __init__(self, events: BlockEvents) -> None:
        self._events = events
        self._begun = False
        self._blocks: list[Block] = []

    def add(self, delta: TextDelta) -> list[msgspec.Struct]:
        """Returns the events of what ``delta`` adds. The first delta begins the answer, even without text."""
        events = [] if self._begun else self._events.begin()
        self._begun = True
        for kind, text in _pieces(delta):
            events += self._show(kind, text)
        return events

    def end(self, end: AnswerEnd) -> list[msgspec.Struct]:
        """Returns the events that end the answer. An answer without a token has one empty block of text."""
        events = [] if self._blocks else self._open(BlockKind.TEXT)
        events += self._events.close(self._blocks[-1], cut=end.cut)
        return events + self._events.end(self._blocks, end)

    def _show(self, kind: BlockKind, text: str) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if not self._blocks or self._blocks[-1].kind is not kind:
            if self._blocks:
                events += self._events.close(self._blocks[-1], cut=False)
            events += self._open(kind)
        block = self._blocks[-1]
        block.pieces.append(text)
        events.append(self._events.piece(block, text))
        return events

    def _open(self, kind: BlockKind) -> list[msgspec.Struct]:
        block = Block(kind, len(self._blocks))
        self._blocks.append(block)
        return self._events.open(block)


def _pieces(delta: TextDelta) -> Iterator[tuple[BlockKind, str]]:
    if delta.text:
        yield BlockKind.TEXT, delta.text


def whole_blocks(completion: Completion) -> list[Block]:
    """Returns the blocks of a whole answer, which are those that its stream would have."""
    [choice] = completion.choices
    assert isinstance(choice, ChatChoice)
    return [Block(BlockKind.TEXT, 0, [choice.message.content or ""])]


def whole_end(completion: Completion) -> AnswerEnd:
    """Returns how a whole answer ended."""
    [choice] = completion.choices
    stop = choice.stop_reason
    cut = choice.finish_reason == ChoiceOutcome.LENGTH.value
    return AnswerEnd(cut, stop if isinstance(stop, str) else None, completion.usage)


def streamed_end(delta: TextDelta, usage: Usage) -> AnswerEnd:
    """Returns how a streamed answer ended whose last delta is ``delta``."""
    stop = delta.stop_reason
    return AnswerEnd(delta.outcome is ChoiceOutcome.LENGTH, stop if isinstance(stop, str) else None, usage)
