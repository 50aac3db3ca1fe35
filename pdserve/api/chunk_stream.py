"""Which server-sent events a text delta becomes, and by which way: of objects, or of parts that are encoded already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET

from pdserve.api.answer_options import AnswerOptions
from pdserve.api.choice_text import Delta
from pdserve.api.outcome import Outcome
from pdserve.api.plain_choices import PlainChoices
from pdserve.api.sse import ChunkEncoder, encode_text
from pdserve.api.surface import Surface, finish_of

_ANSWERS = (Outcome.STOP, Outcome.LENGTH)


class ChunkStream(Protocol):
    """Of one response."""

    def events(self, delta: Delta) -> bytes:
        """Empty if there is nothing to show: the first token always is, even with no text yet."""


def chunk_stream(surface: Surface, encoder: ChunkEncoder, options: AnswerOptions) -> ChunkStream:
    """The fastest that can show all that ``options`` ask for."""
    if options.plain is None or options.logprobs or options.token_ids or options.continuous_usage:
        return FullChunks(surface, encoder, options)
    return PlainChunks(options.plain, encoder, options.echoes)


class FullChunks:
    """Each chunk is an object first."""

    def __init__(self, surface: Surface, encoder: ChunkEncoder, options: AnswerOptions) -> None:
        self._surface = surface
        self._encoder = encoder
        self._options = options
        self._begun: set[int] = set()

    def events(self, delta: Delta) -> bytes:
        first = delta.choice not in self._begun
        events = b""
        if first or delta.text or delta.tokens or (self._options.token_ids and delta.token_ids):
            self._begun.add(delta.choice)
            text = self._options.echoes[delta.choice] + delta.text if first else delta.text
            logprobs = self._options.shown(delta.choice, delta.tokens) if delta.tokens else None
            chunk = self._surface.chunk(delta.choice, text, logprobs, first=first)
            if self._options.token_ids:
                chunk.token_ids = list(delta.token_ids)
                chunk.prompt_token_ids = self._options.prompt_ids[delta.choice] if first else UNSET
            events = self._encoder.chunk(chunk)
        if delta.outcome in _ANSWERS:
            events += self._encoder.chunk(self._surface.last_chunk(delta.choice, finish_of(delta.outcome)))
        return events


class PlainChunks:
    """Text alone: the same bytes, in a tenth of the time."""

    def __init__(self, choices: PlainChoices, encoder: ChunkEncoder, echoes: Sequence[str]) -> None:
        self._choices = choices
        self._encoder = encoder
        self._echoes = echoes
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Of each choice that has begun: what is before and after the text of its later chunks."""

    def events(self, delta: Delta) -> bytes:
        around = self._around.get(delta.choice)
        if around is None:
            events = self._begin(delta)
        elif delta.text:
            events = around[0] + encode_text(delta.text) + around[1]
        else:
            events = b""
        if delta.outcome in _ANSWERS:
            events += self._encoder.wrap(self._choices[delta.choice].last[delta.outcome])
        return events

    def _begin(self, delta: Delta) -> bytes:
        choice = self._choices[delta.choice]
        before, after = choice.later
        self._around[delta.choice] = (self._encoder.head + before, after + self._encoder.tail)
        before, after = choice.first
        return self._encoder.wrap(before + encode_text(self._echoes[delta.choice] + delta.text) + after)
