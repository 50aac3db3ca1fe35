"""Turns text deltas into the chunks of a streamed answer, as server-sent events.

What all chunks of a response share is encoded once. A delta goes one of two ways: ``FullChunks`` encodes an object
for each chunk, and ``PlainChunks`` puts parts together that are encoded already. ``JournaledStream`` writes before each
event what another node needs to go on after it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pdserve.api.answers.answer_form import AnswerForm, AnswerOptions, PlainChoices
from pdserve.api.answers.openai_response import ChunkChoice, Envelope, TextChunkChoice, Usage
from pdserve.api.answers.prompt_scores import PromptScores
from pdserve.api.answers.text_generation import TextDelta
from pdserve.api.generation.request_log import ChoiceOutcome
from pdserve.api.message.parts import MessageParts
from pdserve.control.journal import entry

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class ChunkEncoder:
    """Encodes what is around the choice of each chunk.

    With ``include_usage`` every chunk has a ``usage``, which is null in all but the last.
    """

    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self.head = b"data: " + _encoder.encode(envelope)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: ChunkChoice, prompt_ids: list[int] | None = None) -> bytes:
        """Returns the chunk of a choice, with the prompt's tokens beside it if they are given."""
        if prompt_ids is None:
            return self.wrap(_encoder.encode(choice))
        beside = b'],"prompt_token_ids":' + _encoder.encode(prompt_ids)
        return self.head + _encoder.encode(choice) + beside + self.tail[1:]

    def wrap(self, choice: bytes) -> bytes:
        """Returns the chunk of a choice that is encoded already."""
        return self.head + choice + self.tail

    def use(self, usage: Usage) -> None:
        """Lets the next chunks say how many tokens were used, in place of null."""
        self.tail = b'],"usage":' + _encoder.encode(usage) + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self.head + b'],"usage":' + _encoder.encode(usage) + b"}\n\n"


class Chunks(Protocol):
    """Encodes the chunks of one response. Each is an event."""

    def text(self, delta: TextDelta) -> bytes:
        """Returns the event of what ``delta`` shows, if it shows anything. A first token is shown even without text.

        A choice that fails before it has begun does not begin: another node can still show all of it, with the log
        probabilities of its prompt.
        """

    def finish(self, delta: TextDelta, outcome: ChoiceOutcome) -> bytes:
        """Returns the event of the end of the choice of ``delta``. ``outcome`` is an answer."""


class ChunkStream(Protocol):
    """Encodes the stream of one response."""

    chunks: Chunks

    def events(self, delta: TextDelta) -> bytes:
        """Returns the events of ``delta``, if it has any to show."""


def chunk_stream(form: AnswerForm, encoder: ChunkEncoder, options: AnswerOptions, scores: PromptScores) -> ChunkStream:
    """Returns the fastest stream that can show all that ``options`` ask for."""
    full = FullChunks(form, encoder, options, scores)
    chunks: Chunks = full
    if options.plain is not None and not (options.logprobs or options.token_ids or options.continuous_usage):
        chunks = PlainChunks(options.plain, encoder, options, full)
    return JournaledStream(chunks) if options.journaled else PlainStream(chunks)


class PlainStream:
    """Encodes a stream that has nothing but chunks."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self._text, self._finish = chunks.text, chunks.finish

    def events(self, delta: TextDelta) -> bytes:
        text, outcome = self._text(delta), delta.outcome
        if outcome is not None and outcome.is_answer:
            return text + self._finish(delta, outcome)
        return text


class JournaledStream:
    """Encodes a stream whose events begin with their entries (``pdserve.control.journal``)."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self._text, self._finish = chunks.text, chunks.finish
        self._unwritten: dict[int, list[int]] = {}
        """The tokens of each choice that no entry has yet, because no event shows them."""

    def events(self, delta: TextDelta) -> bytes:
        choice, token_ids, outcome = delta.choice, delta.token_ids, delta.outcome
        if self._unwritten and choice in self._unwritten:
            token_ids = [*self._unwritten.pop(choice), *token_ids]
        events = self._text(delta)
        if events:
            events, token_ids = entry(choice, token_ids) + events, ()
        if outcome is not None and outcome.is_answer:
            return events + entry(choice, token_ids, over=True) + self._finish(delta, outcome)
        if token_ids:
            self._unwritten[choice] = list(token_ids)
        return events


class FullChunks:
    """Encodes each chunk from an object."""

    def __init__(self, form: AnswerForm, encoder: ChunkEncoder, options: AnswerOptions, scores: PromptScores) -> None:
        self._form = form
        self._scores = scores
        self._encoder = encoder
        self._options = options
        self._begun = set(options.journal.choices)

    def text(self, delta: TextDelta) -> bytes:
        first = delta.choice not in self._begun and not delta.only_fails
        if not (first or delta.shows or delta.tokens or (self._options.token_ids and delta.token_ids)):
            return b""
        self._begun.add(delta.choice)
        return self.chunk(delta, first=first)

    def chunk(self, delta: TextDelta, *, first: bool) -> bytes:
        """Returns the event of what ``delta`` shows."""
        text = self._options.echoes[delta.choice] + delta.text if first else delta.text
        logprobs = self._options.shown(delta.choice, delta.tokens) if delta.tokens else None
        if delta.reasoning or delta.calls:
            parts = MessageParts(text, delta.reasoning, delta.calls)
            chunk = self._form.message_chunk(delta.choice, parts, logprobs, self._options.call_id, first=first)
        else:
            chunk = self._form.chunk(delta.choice, text, logprobs, first=first)
        if first and isinstance(chunk, TextChunkChoice) and (echoed := self._scores.echoed(delta.choice)) is not None:
            chunk.logprobs = echoed.encoded(self._form.logprobs(self._options.shown(delta.choice, delta.tokens)))
        if self._options.token_ids:
            chunk.token_ids = list(delta.token_ids)
            if first:
                return self._with_prompt(chunk, self._options.prompt_ids[delta.choice])
        return self._encoder.chunk(chunk)

    def finish(self, delta: TextDelta, outcome: ChoiceOutcome) -> bytes:
        return self._encoder.chunk(
            self._form.last_chunk(delta.choice, outcome.finish, delta.stop_reason, delta.matched_stop)
        )

    def _with_prompt(self, chunk: ChunkChoice, prompt_ids: list[int]) -> bytes:
        if not isinstance(chunk, TextChunkChoice):
            return self._encoder.chunk(chunk, prompt_ids)
        chunk.prompt_token_ids = prompt_ids
        return self._encoder.chunk(chunk)


class PlainChunks:
    """Encodes chunks that have text alone: the same bytes in a tenth of the time. ``full`` encodes the others."""

    def __init__(self, choices: PlainChoices, encoder: ChunkEncoder, options: AnswerOptions, full: FullChunks) -> None:
        self._choices = choices
        self._encoder = encoder
        self._echoes = options.echoes
        self._full = full
        self._around = {choice: self._around_later(choice) for choice in options.journal.choices}
        """Each choice that has begun has the bytes before and after the text of its later chunks here."""

    def text(self, delta: TextDelta) -> bytes:
        around = self._around.get(delta.choice)
        if delta.reasoning or delta.calls:
            self._around[delta.choice] = around or self._around_later(delta.choice)
            return self._full.chunk(delta, first=around is None)
        if around is None:
            return b"" if delta.only_fails else self._begin(delta)
        if delta.text:
            return around[0] + _encoder.encode(delta.text) + around[1]
        return b""

    def finish(self, delta: TextDelta, outcome: ChoiceOutcome) -> bytes:
        return self._encoder.wrap(self._choices.last(delta, outcome))

    def _begin(self, delta: TextDelta) -> bytes:
        self._around[delta.choice] = self._around_later(delta.choice)
        before, after = self._choices[delta.choice].first
        return self._encoder.wrap(before + _encoder.encode(self._echoes[delta.choice] + delta.text) + after)

    def _around_later(self, choice: int) -> tuple[bytes, bytes]:
        before, after = self._choices[choice].later
        return self._encoder.head + before, after + self._encoder.tail
