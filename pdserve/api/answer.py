"""Text deltas to the response of a completion: whole, or as a stream of events."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from msgspec import UNSET

from pdserve.api.choice_text import Delta
from pdserve.api.logprobs import ShownLogprobs
from pdserve.api.outcome import Outcome
from pdserve.api.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    Choice,
    ChunkChoice,
    Completion,
    Envelope,
    Finish,
    Message,
    PromptTokensDetails,
    TextChoice,
    Usage,
)
from pdserve.api.shown_tokens import ShownToken
from pdserve.api.sse import DONE, ChunkEncoder, error_event
from pdserve.api.text_generation import TextGeneration
from pdserve.errors import Internal, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a client asked for about the form of its answer."""

    model: str
    fingerprint: str
    prompt_ids: Sequence[list[int]]
    """Of each choice."""
    echoes: Sequence[str]
    """Of each choice: shown before its text."""
    token_bytes: Callable[[int], bytes]
    """Of one token by itself."""
    logprobs: bool = False
    include_usage: bool = False
    token_ids: bool = False

    def shown(self, choice: int, tokens: Sequence[ShownToken]) -> ShownLogprobs:
        """For an answer or chunk that reports these tokens."""
        return ShownLogprobs(tokens, self.token_bytes, len(self.echoes[choice]))


class Surface(Protocol):
    """One of the two completion routes' forms."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, index: int, text: str, finish: Finish, logprobs: ShownLogprobs | None) -> Choice: ...

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice: ...

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice: ...


class ChatSurface:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: Finish, logprobs: ShownLogprobs | None) -> Choice:
        return ChatChoice(index, Message(text), finish, None if logprobs is None else logprobs.for_chat())

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice:
        delta = ChatDelta("assistant" if first else UNSET, text)
        return ChatChunkChoice(index, delta, logprobs=None if logprobs is None else logprobs.for_chat())

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice:
        return ChatChunkChoice(index, ChatDelta(), finish)


class TextSurface:
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, text: str, finish: Finish, logprobs: ShownLogprobs | None) -> Choice:
        return TextChoice(index, text, finish, None if logprobs is None else logprobs.for_text())

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice:
        return TextChoice(index, text, logprobs=None if logprobs is None else logprobs.for_text())

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice:
        return TextChoice(index, "", finish)


CHAT: Surface = ChatSurface()
TEXT: Surface = TextSurface()


async def whole_answer(
    surface: Surface, run: TextGeneration, first: Sequence[Delta], options: AnswerOptions
) -> Completion:
    """Waits for all of it. Raises RequestError if there is no answer."""
    texts = list(options.echoes)
    ids: list[list[int]] = [[] for _ in texts]
    tokens: list[list[ShownToken]] = [[] for _ in texts]
    finishes: dict[int, Finish] = {}
    deltas: Sequence[Delta] = first
    while True:
        for delta in deltas:
            texts[delta.choice] += delta.text
            ids[delta.choice].extend(delta.token_ids)
            tokens[delta.choice].extend(delta.tokens)
            if delta.outcome is not None:
                finishes[delta.choice] = _finish(delta.outcome)
        if run.done and run.failure is None:
            break
        deltas = await run.next()
    choices = [
        surface.choice(index, text, finishes[index], options.shown(index, tokens[index]) if options.logprobs else None)
        for index, text in enumerate(texts)
    ]
    if options.token_ids:
        for choice in choices:
            choice.token_ids, choice.prompt_token_ids = ids[choice.index], options.prompt_ids[choice.index]
    head = _envelope(surface.id_prefix, surface.object, options)
    return Completion(head.id, head.object, head.created, head.model, head.system_fingerprint, choices, usage_of(run))


async def streamed_answer(
    surface: Surface, run: TextGeneration, first: Sequence[Delta], options: AnswerOptions
) -> AsyncIterator[bytes]:
    """Server-sent events; one item for each time that the engine had something. ``run`` stays the caller's to close."""
    encoder = ChunkEncoder(
        _envelope(surface.id_prefix, surface.chunk_object, options), include_usage=options.include_usage
    )
    stream = ChunkStream(surface, encoder, options)
    deltas: Sequence[Delta] = first
    try:
        while True:
            if data := b"".join([event for delta in deltas for event in stream.events(delta)]):
                yield data
            if run.done and run.failure is None:
                break
            deltas = await run.next()
    except RequestError as error:
        yield error_event(error)
        return
    except Exception:
        # Status 200 has gone out: the client learns of a defect here or not at all.
        logger.exception("unexpected error in a stream")
        yield error_event(Internal("internal error; the node's log has the details"))
        return
    yield (encoder.usage(usage_of(run)) if options.include_usage else b"") + DONE


class ChunkStream:
    """Which chunks a delta becomes."""

    def __init__(self, surface: Surface, encoder: ChunkEncoder, options: AnswerOptions) -> None:
        self._surface = surface
        self._encoder = encoder
        self._options = options
        self._begun: set[int] = set()

    def events(self, delta: Delta) -> list[bytes]:
        """None, if there is nothing to show: the first token always is, even with no text yet."""
        first = delta.choice not in self._begun
        events = []
        if first or delta.text or delta.tokens or (self._options.token_ids and delta.token_ids):
            self._begun.add(delta.choice)
            text = self._options.echoes[delta.choice] + delta.text if first else delta.text
            logprobs = self._options.shown(delta.choice, delta.tokens) if delta.tokens else None
            chunk = self._surface.chunk(delta.choice, text, logprobs, first=first)
            if self._options.token_ids:
                chunk.token_ids = list(delta.token_ids)
                chunk.prompt_token_ids = self._options.prompt_ids[delta.choice] if first else UNSET
            events.append(self._encoder.chunk(chunk))
        if delta.outcome in (Outcome.STOP, Outcome.LENGTH):
            events.append(self._encoder.chunk(self._surface.last_chunk(delta.choice, _finish(delta.outcome))))
        return events


def usage_of(run: TextGeneration) -> Usage:
    record = run.record
    prompt, output = record.prompt_tokens, record.output_tokens
    # Several choices of one prompt find it in the cache each; OpenAI counts a prompt once.
    cached = min(record.cached_tokens, prompt)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))


def _finish(outcome: Outcome) -> Finish:
    return cast("Finish", outcome.value)


def _envelope(id_prefix: str, kind: str, options: AnswerOptions) -> Envelope:
    return Envelope(id_prefix + uuid.uuid4().hex, kind, int(time.time()), options.model, options.fingerprint)
