"""The forms of the two completion routes: what differs between chat and text."""

from __future__ import annotations

from typing import Protocol, cast

import msgspec
from msgspec import UNSET

from pdserve.api.logprobs import ShownLogprobs
from pdserve.api.outcome import Outcome
from pdserve.api.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    Choice,
    ChunkChoice,
    Finish,
    Message,
    TextChoice,
    TextLogprobs,
)


class Surface(Protocol):
    """One of the two completion routes' forms."""

    id_prefix: str
    object: str
    chunk_object: str

    def logprobs(self, shown: ShownLogprobs) -> ChatLogprobs | TextLogprobs: ...

    def choice(self, index: int, text: str, finish: Finish, logprobs: msgspec.Raw | None) -> Choice: ...

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice: ...

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice: ...


class ChatSurface:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def logprobs(self, shown: ShownLogprobs) -> ChatLogprobs:
        return shown.for_chat()

    def choice(self, index: int, text: str, finish: Finish, logprobs: msgspec.Raw | None) -> Choice:
        return ChatChoice(index, Message(text), finish, logprobs)

    def chunk(self, index: int, text: str, logprobs: ShownLogprobs | None, *, first: bool) -> ChunkChoice:
        delta = ChatDelta("assistant" if first else UNSET, text)
        return ChatChunkChoice(index, delta, logprobs=None if logprobs is None else logprobs.for_chat())

    def last_chunk(self, index: int, finish: Finish) -> ChunkChoice:
        return ChatChunkChoice(index, ChatDelta(), finish)


class TextSurface:
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


def finish_of(outcome: Outcome) -> Finish:
    """Of an answer."""
    return cast("Finish", outcome.value)


CHAT: Surface = ChatSurface()
TEXT: Surface = TextSurface()
