"""The form of an answer: what differs between chat and text completions, and what the client asked for.

``PlainChoices`` holds the encoded choices of chunks that carry text and nothing else: all but the text is the same
in every response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec
from msgspec import UNSET

from pdserve.api.answers.logprobs import ShownLogprobs, ShownToken
from pdserve.api.answers.openai_response import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Choice,
    ChunkChoice,
    Finish,
    TextChoice,
    TextLogprobs,
)
from pdserve.api.outcome import ChoiceOutcome


class AnswerForm(Protocol):
    """One of the two completion routes' forms."""

    id_prefix: str
    object: str
    chunk_object: str

    def logprobs(self, shown: ShownLogprobs) -> ChatLogprobs | TextLogprobs: ...

    def choice(self, index: int, text: str, finish: Finish, logprobs: msgspec.Raw | None) -> Choice: ...

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice: ...

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice: ...


class ChatForm:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, shown: ShownLogprobs) -> ChatLogprobs:
        return shown.for_chat()

    def choice(self, index: int, text: str, finish: Finish, logprobs: msgspec.Raw | None) -> Choice:
        return ChatChoice(index, ChatMessage(text), finish, logprobs)

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice:
        delta = ChatDelta("assistant" if first else UNSET, text)
        return ChatChunkChoice(index, delta, logprobs=None if logprobs is None else logprobs.for_chat())

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice:
        return ChatChunkChoice(index, ChatDelta(), finish)


class TextForm:
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def logprobs(self, shown: ShownLogprobs) -> TextLogprobs:
        return shown.for_text()

    def choice(self, index: int, text: str, finish: Finish, logprobs: msgspec.Raw | None) -> Choice:
        return TextChoice(index, text, finish, logprobs)

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice:
        return TextChoice(index, text, logprobs=None if logprobs is None else logprobs.for_text())

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice:
        return TextChoice(index, "", finish)


def finish_of(outcome: ChoiceOutcome) -> Finish:
    """Of an answer."""
    return cast("Finish", outcome.value)


CHAT_FORM: AnswerForm = ChatForm()
TEXT_FORM: AnswerForm = TextForm()

_NO_TEXT = b'""'
"""An empty text, encoded; nothing after the text of a plain choice looks like it."""


@dataclass(frozen=True, slots=True)
class PlainChoice:
    """Of one index."""

    first: tuple[bytes, bytes]
    """What is before and after the text of its first chunk."""
    later: tuple[bytes, bytes]
    last: dict[ChoiceOutcome, bytes]
    """The choice of the chunk with the finish reason."""


class PlainChoices(dict[int, PlainChoice]):
    """Of one form, by index, encoded as they are first asked for."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__()
        self._form = form

    def __missing__(self, index: int) -> PlainChoice:
        form = self._form
        choice = self[index] = PlainChoice(
            _around(form.chunk(index, "", None, first=True)),
            _around(form.chunk(index, "", None, first=False)),
            {
                outcome: msgspec.json.encode(form.last_chunk(index, finish_of(outcome)))
                for outcome in (ChoiceOutcome.STOP, ChoiceOutcome.LENGTH)
            },
        )
        return choice


def _around(choice: ChunkChoice) -> tuple[bytes, bytes]:
    before, _, after = msgspec.json.encode(choice).rpartition(_NO_TEXT)
    return before, after


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Of all choices of one request."""

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
    continuous_usage: bool = False
    """Every chunk says what was used so far."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Log probabilities name tokens by their ids."""
    plain: PlainChoices | None = None
    """The form's, for the fast path; None keeps to the full one."""

    def shown(self, choice: int, tokens: Sequence[ShownToken]) -> ShownLogprobs:
        """For an answer or chunk that reports these tokens."""
        return ShownLogprobs(tokens, self.token_bytes, len(self.echoes[choice]), self.tokens_as_ids)
