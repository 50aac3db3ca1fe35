"""Turns text deltas into the chunks of a streamed answer, as server-sent events.

What all chunks of a response share is encoded once. A delta goes one of two ways: ``FullChunks`` encodes an object
for each chunk, and ``PlainChunks`` puts parts together that are encoded already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from pdserve.api.answers.answer_form import AnswerForm, AnswerOptions, PlainChoices
from pdserve.api.answers.openai_response import ChunkChoice, Envelope, Usage
from pdserve.api.answers.text_generation import TextDelta

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def encode_text(text: str) -> bytes:
    """Returns ``text`` as a JSON string."""
    return _encoder.encode(text)


class ChunkEncoder:
    """Encodes what is around the choice of each chunk.

    With ``include_usage`` every chunk has a ``usage``, which is null in all but the last.
    """

    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self.head = b"data: " + _encoder.encode(envelope)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: ChunkChoice) -> bytes:
        return self.wrap(_encoder.encode(choice))

    def wrap(self, choice: bytes) -> bytes:
        """Returns the chunk of a choice that is encoded already."""
        return self.head + choice + self.tail

    def use(self, usage: Usage) -> None:
        """Lets the next chunks say how many tokens were used, in place of null."""
        self.tail = b'],"usage":' + _encoder.encode(usage) + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self.head + b'],"usage":' + _encoder.encode(usage) + b"}\n\n"


class ChunkStream(Protocol):
    """Encodes the stream of one response."""

    def events(self, delta: TextDelta) -> bytes:
        """Returns the events of ``delta``, if it has any to show. A first token is shown even without text."""


def chunk_stream(form: AnswerForm, encoder: ChunkEncoder, options: AnswerOptions) -> ChunkStream:
    """Returns the fastest stream that can show all that ``options`` ask for."""
    if options.plain is None or options.logprobs or options.token_ids or options.continuous_usage:
        return FullChunks(form, encoder, options)
    return PlainChunks(options.plain, encoder, options.echoes)


class FullChunks:
    """Encodes each chunk from an object."""

    def __init__(self, form: AnswerForm, encoder: ChunkEncoder, options: AnswerOptions) -> None:
        self._form = form
        self._encoder = encoder
        self._options = options
        self._begun: set[int] = set()

    def events(self, delta: TextDelta) -> bytes:
        first = delta.choice not in self._begun
        events = b""
        if first or delta.text or delta.tokens or (self._options.token_ids and delta.token_ids):
            self._begun.add(delta.choice)
            text = self._options.echoes[delta.choice] + delta.text if first else delta.text
            logprobs = self._options.shown(delta.choice, delta.tokens) if delta.tokens else None
            chunk = self._form.chunk(delta.choice, text, logprobs, first=first)
            if self._options.token_ids:
                chunk.token_ids = list(delta.token_ids)
                chunk.prompt_token_ids = self._options.prompt_ids[delta.choice] if first else UNSET
            events = self._encoder.chunk(chunk)
        if delta.outcome is not None and delta.outcome.is_answer:
            events += self._encoder.chunk(self._form.last_chunk(delta.choice, delta.outcome.finish))
        return events


class PlainChunks:
    """Encodes chunks that have text alone: the same bytes in a tenth of the time."""

    def __init__(self, choices: PlainChoices, encoder: ChunkEncoder, echoes: Sequence[str]) -> None:
        self._choices = choices
        self._encoder = encoder
        self._echoes = echoes
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Each choice that has begun has the bytes before and after the text of its later chunks here."""

    def events(self, delta: TextDelta) -> bytes:
        around = self._around.get(delta.choice)
        if around is None:
            events = self._begin(delta)
        elif delta.text:
            events = around[0] + encode_text(delta.text) + around[1]
        else:
            events = b""
        if delta.outcome is not None and delta.outcome.is_answer:
            events += self._encoder.wrap(self._choices[delta.choice].last[delta.outcome])
        return events

    def _begin(self, delta: TextDelta) -> bytes:
        choice = self._choices[delta.choice]
        before, after = choice.later
        self._around[delta.choice] = (self._encoder.head + before, after + self._encoder.tail)
        before, after = choice.first
        return self._encoder.wrap(before + encode_text(self._echoes[delta.choice] + delta.text) + after)
