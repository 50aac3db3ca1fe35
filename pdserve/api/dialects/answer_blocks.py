"""Cuts an answer into blocks: pieces of text of one kind, of which a dialect shows the beginning and the end."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from pdserve.api.answers.openai_response import ChatTokenLogprob, Usage
from pdserve.api.generation.request_log import ChoiceOutcome
from pdserve.api.message.parts import CallPiece, TextPiece
from pdserve.errors import RequestError

if TYPE_CHECKING:  # A build that describes the interface has no tokeniser.
    from pdserve.api.answers.answer_form import AnswerOptions
    from pdserve.api.answers.logprobs import ShownToken
    from pdserve.api.answers.text_generation import TextDelta


class BlockKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block of an answer, as far as it has come."""

    kind: BlockKind
    index: int
    """Its place among the blocks of the answer."""
    call_id: str = ""
    """The id of a call."""
    name: str = ""
    """The name of the function that a call is for."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    """The log probabilities of the tokens of a text, if the request asked for them."""

    @property
    def text(self) -> str:
        """What it says; of a call, its arguments as JSON."""
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

    def piece(self, block: Block, text: str, logprobs: list[ChatTokenLogprob]) -> msgspec.Struct:
        """Returns what shows the next ``text`` of ``block``, and the log probabilities of its tokens."""

    def close(self, block: Block, *, cut: bool) -> list[msgspec.Struct]:
        """Returns the end of ``block``. ``cut`` says whether the limit of tokens has ended it."""

    def end(self, blocks: Sequence[Block], end: AnswerEnd) -> list[msgspec.Struct]:
        """Returns what follows all blocks."""

    def complete(self, blocks: Sequence[Block], end: AnswerEnd) -> msgspec.Struct:
        """Returns the answer in one piece."""

    def fail(self, blocks: Sequence[Block], error: RequestError) -> list[msgspec.Struct]:
        """Returns what says that the answer breaks off; nothing if the error itself is the last event."""


class AnswerBlocks:
    """The blocks of one answer."""

    def __init__(self, events: BlockEvents, options: AnswerOptions) -> None:
        self._events = events
        self._options = options
        self._begun = False
        self._blocks: list[Block] = []

    def add(self, delta: TextDelta) -> list[msgspec.Struct]:
        """Returns the events of what ``delta`` adds. The first delta begins the answer, even without text."""
        events = [] if self._begun else self._events.begin()
        self._begun = True
        if delta.order:
            return events + self._in_order(delta)
        if delta.reasoning:
            events += self._show(BlockKind.REASONING, delta.reasoning)
        if delta.text:
            events += self._show(BlockKind.TEXT, delta.text, delta.text_tokens)
        for piece in delta.calls:
            events += self._call(piece)
        return events

    def end(self, end: AnswerEnd) -> list[msgspec.Struct]:
        """Returns the events that end the answer. An answer without a token has one empty block of text."""
        events = [] if self._blocks else self._open(BlockKind.TEXT)
        events += self._events.close(self._blocks[-1], cut=end.cut)
        return events + self._events.end(self._blocks, end)

    def complete(self) -> Sequence[Block]:
        """Returns the blocks of an answer that has ended and goes out in one piece."""
        if not self._blocks:
            self._open(BlockKind.TEXT)
        return self._blocks

    def fail(self, error: RequestError) -> list[msgspec.Struct]:
        """Returns the events that say that the answer breaks off, if the dialect has any."""
        return self._events.fail(self._blocks, error)

    def _in_order(self, delta: TextDelta) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        texts = self._tokens(delta)
        for piece in delta.order:
            if isinstance(piece, CallPiece):
                events += self._call(piece)
            elif piece.thought:
                events += self._show(BlockKind.REASONING, piece.text)
            else:
                events += self._show(BlockKind.TEXT, piece.text, next(texts))
        return events

    def _tokens(self, delta: TextDelta) -> Iterator[Sequence[ShownToken]]:
        """Yields the tokens of each piece of content; of the first one, all that belong to no certain piece."""
        texts = sum(isinstance(piece, TextPiece) and not piece.thought for piece in delta.order)
        tokens, runs = delta.text_tokens, delta.parsed_runs
        if len(runs) != texts:
            runs = [len(tokens), *[0] * (texts - 1)]
        start = 0
        for count in runs:
            yield tokens[start : start + count]
            start += count

    def _call(self, piece: CallPiece) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if piece.name is not None:
            events += self._open(BlockKind.CALL, self._options.call_id(0, piece.index), piece.name)
        if piece.arguments:
            events += self._show(BlockKind.CALL, piece.arguments)
        return events

    def _show(self, kind: BlockKind, text: str, tokens: Sequence[ShownToken] = ()) -> list[msgspec.Struct]:
        """Returns the events of ``text``, for which a block of its kind begins unless the last one is of that kind."""
        events: list[msgspec.Struct] = []
        if not self._blocks or self._blocks[-1].kind is not kind:
            events += self._open(kind)
        block = self._blocks[-1]
        block.pieces.append(text)
        logprobs = self._options.shown(0, tokens).for_chat().content if tokens else []
        block.logprobs += logprobs
        events.append(self._events.piece(block, text, logprobs))
        return events

    def _open(self, kind: BlockKind, call_id: str = "", name: str = "") -> list[msgspec.Struct]:
        events = self._events.close(self._blocks[-1], cut=False) if self._blocks else []
        self._blocks.append(Block(kind, len(self._blocks), call_id, name))
        return events + self._events.open(self._blocks[-1])


def answer_end(delta: TextDelta, usage: Usage) -> AnswerEnd:
    """Returns how an answer ended whose last delta is ``delta``."""
    stop = delta.stop_reason
    return AnswerEnd(delta.outcome is ChoiceOutcome.LENGTH, stop if isinstance(stop, str) else None, usage)
