"""Makes the response of a completion out of text deltas: complete, or as a stream of server-sent events.

What all chunks of a stream share is encoded once. A delta goes one of two ways: ``FullChunks`` encodes an object for
each chunk, and ``PlainChunks`` puts parts together that are encoded already. ``JournaledStream`` writes before each
event what another node needs to go on after it.

A complete response that is not ready soon goes out with a journal before it (``pdserve.control.journal``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

import msgspec

from pdserve.api.answers.answer_form import AnswerForm, AnswerOptions, PlainChoices, PromptScores
from pdserve.api.answers.logprobs import CompleteLogprobs, ShownToken, without_infinity
from pdserve.api.answers.openai_response import (
    Choice,
    ChunkChoice,
    Completion,
    CompletionTokensDetails,
    Envelope,
    Finish,
    PromptTokensDetails,
    StopReason,
    TextChunkChoice,
    Usage,
)
from pdserve.api.answers.text_generation import TextDelta, TextGeneration, parts_of
from pdserve.api.generation.request_log import ChoiceOutcome
from pdserve.api.message.parts import MessageParts, PartsBuilder
from pdserve.api.requests.openai_request import GenerationRequest
from pdserve.control.journal import (
    DONE_ENTRY,
    JOURNALED_ANSWER,
    USAGE_ENTRY,
    AnswerHead,
    entry,
    entry_with_logprobs,
    move_line,
)
from pdserve.errors import RequestError
from pdserve.http.errors import error_body, error_event, error_form, error_headers, internal_error
from pdserve.http.request import JSON, PIECE_BYTES, Reply

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


ENTRY_TOKENS = 256
"""An entry has the log probabilities of so many tokens at most."""

log = logging.getLogger(__name__)


class CompleteAnswer:
    """An answer that goes out in one piece, as far as its deltas have come."""

    def __init__(self, form: AnswerForm, options: AnswerOptions) -> None:
        self._form = form
        self._scores = PromptScores(form, options)
        self._likelihoods = [0.0] * len(options.echoes)
        """The sum of the log probabilities of each choice's tokens, where some choices are not shown."""
        self._options = options
        self._messages = [PartsBuilder() for _ in options.echoes]
        for message, echo in zip(self._messages, options.echoes, strict=True):
            message.content(echo)
        self._ids: list[list[int]] = [[] for _ in self._messages]
        self._logprobs = [CompleteLogprobs() for _ in self._messages]
        self._finishes: dict[int, Finish] = {}
        self._stop_reasons: dict[int, StopReason] = {}
        self._matched_stops: dict[int, StopReason] = {}
        self._journaled = [len(options.journal.emitted(index)) for index in range(len(self._messages))]
        """How many tokens of each choice have an entry, or how many of ``_reported`` if there are log probabilities."""
        self._reported: list[list[ShownToken]] = [[] for _ in self._messages]
        """The tokens of each choice whose log probabilities were added since the last entries."""

    def add(self, deltas: Sequence[TextDelta]) -> None:
        self._scores.take(deltas)
        for delta in deltas:
            self._messages[delta.choice].add(parts_of(delta))
            self._ids[delta.choice].extend(delta.token_ids)
            if delta.tokens:
                if self._options.logprobs:
                    shown = self._options.shown(delta.choice, self._scored(delta))
                    self._logprobs[delta.choice].add(self._form.logprobs(shown))
                if self._options.journaled:
                    self._reported[delta.choice].extend(delta.tokens)
                chosen = (token.logprobs.chosen for token in delta.tokens if token.logprobs)
                self._likelihoods[delta.choice] += sum(chosen)
            if delta.outcome is not None:
                self._finishes[delta.choice] = delta.outcome.finish
                self._stop_reasons[delta.choice] = delta.stop_reason
                self._matched_stops[delta.choice] = delta.matched_stop

    def _scored(self, delta: TextDelta) -> Sequence[ShownToken]:
        """Returns the tokens of ``delta`` whose log probabilities the answer shows."""
        return delta.tokens

    def entries(self) -> bytes:
        """Returns the entries of the tokens that have none yet, in this node's response or in another node's."""
        entries = []
        for index, journaled in enumerate(self._journaled):
            if self._options.logprobs:
                tokens, self._reported[index] = self._reported[index], []
                self._journaled[index] = max(0, journaled - len(tokens))
                entries += [
                    _entry_of(index, tokens[start : start + ENTRY_TOKENS])
                    for start in range(journaled, len(tokens), ENTRY_TOKENS)
                ]
            elif len(self._ids[index]) > journaled:
                entries.append(entry(index, self._ids[index][journaled:]))
                self._journaled[index] = len(self._ids[index])
        return b"".join(entries)

    async def end(self) -> None:
        """Makes the answer ready to be ``encoded``. The log probabilities of a long prompt take several turns."""
        await self._scores.encode()

    def encoded(self, usage: Usage) -> bytes:
        """Returns the answer, whose choices are all over and which has its ``end``, as JSON."""
        return msgspec.json.encode(self.completion(usage))

    def completion(self, usage: Usage) -> Completion:
        """Returns the answer, whose choices are all over."""
        form, options = self._form, self._options
        numbers = self._shown_numbers()
        choices = [self._choice(number, index) for index, number in enumerate(numbers)]
        head = _envelope(form.id_prefix, form.object, options)
        complete = Completion(head.id, head.object, head.created, head.model, head.system_fingerprint, choices, usage)
        return form.completion(
            complete,
            [options.prompt_ids[number] for number in numbers] if options.token_ids else None,
            [self._scores.listed(number) for number in numbers],
        )

    def _choice(self, number: int, index: int) -> Choice:
        """Returns the choice of that number, which the client sees as number ``index``."""
        options = self._options
        logprobs = self._all_logprobs(number) if options.logprobs else None
        parts, finish = self._messages[number].parts(), self._finishes[number]
        choice = self._form.choice(index, parts, finish, logprobs, options.call_id)
        choice.stop_reason = self._stop_reasons.get(number)
        choice.matched_stop = self._matched_stops.get(number)
        choice.token_ids = self._ids[number] if options.token_ids else None
        return choice

    def _all_logprobs(self, number: int) -> msgspec.Raw:
        """Returns the log probabilities of a choice's tokens, after those of its prompt if that is echoed."""
        echoed, empty = self._scores.echoed(number), self._form.logprobs(self._options.shown(number, ()))
        if echoed is None:
            return self._logprobs[number].encoded(empty)
        echoed.extend(self._logprobs[number])
        return echoed.encoded(empty)

    def _shown_numbers(self) -> list[int]:
        """Returns the numbers of the choices that the client gets: of each prompt the likeliest, if not all."""
        options, numbers = self._options, range(len(self._messages))
        if options.choices == options.shown_choices:
            return list(numbers)
        shown: list[int] = []
        for first in range(0, len(numbers), options.choices):
            of_prompt = numbers[first : first + options.choices]
            best = sorted(of_prompt, key=lambda number: -self._likelihoods[number])
            shown += best[: options.shown_choices]
        return shown


class OpenAiAnswers:
    """The answers to a route of OpenAI's chat or text completions."""

    grouped = False

    def __init__(self, form: AnswerForm) -> None:
        self._form = form

    def stream(
        self,
        body: GenerationRequest,  # ``options`` has what an answer needs of it
        generation: TextGeneration,
        first: Sequence[TextDelta],
        options: AnswerOptions,
    ) -> AsyncGenerator[bytes, None]:
        return streamed_answer(self._form, generation, first, options)

    def complete(self, body: GenerationRequest, options: AnswerOptions) -> CompleteAnswer:
        return CompleteAnswer(self._form, options)


async def complete_answer(answer: CompleteAnswer, generation: TextGeneration, first: Sequence[TextDelta]) -> bytes:
    """Waits until ``answer`` is complete and returns it as JSON. Raises RequestError if there is none."""
    answer.add(first)
    while not (generation.done and generation.failure is None):
        answer.add(await generation.next())
    await answer.end()
    return answer.encoded(usage_of(generation))


async def streamed_answer(
    form: AnswerForm, generation: TextGeneration, first: Sequence[TextDelta], options: AnswerOptions
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events: one item for each time that the engine had something.

    The caller still has to close ``generation``. Raises RequestError if there is no answer and no event before that.
    """
    journaled, has, begun = options.journaled, options.journal, False
    encoder = ChunkEncoder(_envelope(form.id_prefix, form.chunk_object, options), include_usage=options.include_usage)
    scores = PromptScores(form, options)
    scored = options.echo_logprobs is not None or options.prompt_logprobs is not None
    stream = chunk_stream(form, encoder, options, scores)
    deltas: Sequence[TextDelta] = first
    try:
        while True:
            if options.continuous_usage:
                encoder.use(usage_of(generation))
            if scored:
                scores.take(deltas)
                await scores.encode()
            data = stream.events(deltas[0]) if len(deltas) == 1 else b"".join(map(stream.events, deltas))
            if generation.done and generation.failure is None:
                break
            if data:
                begun = True
                yield data
            deltas = await generation.next()
    except RequestError as error:
        if not begun:
            raise
        # A journaled stream that ends without its end is one that another node is to go on with.
        if not (journaled and generation.node_failed):
            yield error_event(error)
        return
    except Exception:
        # Status 200 has gone out: the client learns of a defect here or not at all.
        log.exception("request_id=%s unexpected error in a stream", generation.record.request_id)
        yield error_event(internal_error("node"))
        return
    if options.include_usage and not has.usage:
        data += (USAGE_ENTRY if journaled else b"") + encoder.usage(usage_of(generation))
    if not has.done:
        data += (DONE_ENTRY if journaled else b"") + DONE
    yield data


def usage_of(generation: TextGeneration) -> Usage:
    record = generation.record
    prompt, output = record.prompt_tokens, record.answer_tokens
    # Several choices of one prompt find it in the cache each; OpenAI counts a prompt once.
    cached = min(record.cached_tokens, prompt)
    reasoning = CompletionTokensDetails(generation.reasoning_tokens)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached), reasoning)


def _entry_of(choice: int, tokens: Sequence[ShownToken]) -> bytes:
    logprobs = [without_infinity(token.logprobs) for token in tokens if token.logprobs]
    return entry_with_logprobs(choice, [token.token_id for token in tokens], logprobs)


def _envelope(id_prefix: str, kind: str, options: AnswerOptions) -> Envelope:
    answer = options.answer
    return Envelope(id_prefix + answer.id.hex(), kind, answer.created, options.model, options.fingerprint)


JOURNAL_INTERVAL_S = 0.25
"""The time from one write of entries to the next, and from the first token to the first of them."""


class Ended(msgspec.Struct, frozen=True):
    """The end of an answer."""

    head: AnswerHead | None
    """None if another node is to go on with the answer."""
    body: bytes = b""


async def respond_journaled(
    request: Reply,
    headers: Mapping[str, str],
    generation: TextGeneration,
    first: Sequence[TextDelta],
    answer: CompleteAnswer,
) -> None:
    """Sends the complete answer with ``headers``, and before it a journal if it takes long.

    The caller still has to close ``generation``. Raises RequestError if there is no answer and no byte has gone out.
    """
    answer.add(first)
    while (ended := await _end_within(JOURNAL_INTERVAL_S, request, headers, generation, answer)) is None:
        await _send_entries(request, answer.entries() + move_line(generation.take_move()))
    if ended.head is None:
        await request.send(b"", more=False)
    elif request.answered:
        await _send_last(request, ended.head.encode() + ended.body)
    else:
        await request.respond(ended.head.status, ended.head.headers, ended.body)


async def _end_within(
    seconds: float, request: Reply, headers: Mapping[str, str], generation: TextGeneration, answer: CompleteAnswer
) -> Ended | None:
    """Adds what comes in so many seconds to ``answer``. Returns the end of the answer if that comes too."""
    until = time.monotonic() + seconds
    try:
        while not (generation.done and generation.failure is None):
            answer.add(await generation.next(max(until - time.monotonic(), 0.0)))
            if time.monotonic() >= until and not generation.done:
                return None
        await answer.end()
        body = answer.encoded(usage_of(generation))
        return Ended(AnswerHead(200, {**JSON, **headers}), body)
    except RequestError as error:
        if not request.answered:
            raise
        return Ended(None) if generation.node_failed else _failed(request, error)
    except Exception:
        if not request.answered:
            raise
        # Status 200 has gone out: the client learns of a defect here or not at all.
        log.exception("request_id=%s unexpected error in a journaled answer", generation.record.request_id)
        return _failed(request, internal_error("node"))


async def _send_entries(request: Reply, entries: bytes) -> None:
    if not request.answered:
        await request.begin(200, {"content-type": JOURNALED_ANSWER}, entries, more=True)
    elif entries and not request.write(entries):
        await request.drain()


async def _send_last(request: Reply, data: bytes) -> None:
    for start in range(0, len(data), PIECE_BYTES):
        end = start + PIECE_BYTES
        await request.send(data[start:end], more=end < len(data))


def _failed(request: Reply, error: RequestError) -> Ended:
    body = error_body(error, error_form(request.path), request.label)
    return Ended(AnswerHead(error.status, {**JSON, **error_headers(error)}), body)
