"""What the routes of the dialects answer with: a parser of their requests, and the answers to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from pdserve.api.answers.answer import WholeAnswer
from pdserve.api.answers.answer_form import CHAT_FORM, AnswerOptions
from pdserve.api.answers.logprobs import ShownToken
from pdserve.api.answers.openai_response import Usage
from pdserve.api.answers.text_generation import TextDelta, TextGeneration
from pdserve.api.dialects.answer_blocks import AnswerBlocks, BlockEvents, answer_end
from pdserve.api.dialects.dialect_request import SamplingRequest, TranslatedChat
from pdserve.api.dialects.dialect_stream import dialect_stream
from pdserve.api.dialects.messages_answer import MessageEvents
from pdserve.api.dialects.responses_answer import ResponseEvents
from pdserve.api.requests.openai_request import BodyParser, Parsed
from pdserve.errors import InvalidRequest
from pdserve.http.errors import ErrorForm

S = TypeVar("S", bound=SamplingRequest)


class DialectParser(Generic[S]):
    """Reads the bodies of one route of a dialect."""

    def __init__(self, body: type[S], unheeded: Callable[[S], tuple[str, ...]] = lambda _: ()) -> None:
        """``unheeded`` names the fields that have no effect."""
        self._parser = BodyParser(body)
        self._unheeded = unheeded

    def parse(self, body: bytes, chat_of: Callable[[S], TranslatedChat]) -> Parsed[TranslatedChat]:
        """Returns the chat request that ``chat_of`` makes of ``body``.

        Raises InvalidRequest, which names the field at fault.
        """
        parsed = self._parser.parse(body)
        try:
            return Parsed(chat_of(parsed.request), parsed.ignored + self._unheeded(parsed.request))
        except RecursionError as exc:
            raise InvalidRequest("the body is nested too deeply", code="invalid_json") from exc


class TranslatedAnswer(WholeAnswer):
    """An answer in one piece, which goes out in a dialect. It has the blocks that its stream would have."""

    def __init__(self, options: AnswerOptions, events: BlockEvents) -> None:
        super().__init__(CHAT_FORM, options)
        self._events = events
        self._blocks = AnswerBlocks(events, options)
        self._last: TextDelta | None = None

    def add(self, deltas: Sequence[TextDelta]) -> None:
        super().add(deltas)
        for delta in deltas:
            self._blocks.add(delta)
            self._last = delta

    def _scored(self, delta: TextDelta) -> Sequence[ShownToken]:
        return ()  # the blocks have the log probabilities

    def encoded(self, usage: Usage) -> bytes:
        assert self._last is not None
        return msgspec.json.encode(self._events.whole(self._blocks.whole(), answer_end(self._last, usage)))


class ResponsesAnswers:
    """The answers to ``/v1/responses``."""

    grouped = True

    def stream(
        self, body: TranslatedChat, generation: TextGeneration, first: Sequence[TextDelta], options: AnswerOptions
    ) -> AsyncGenerator[bytes, None]:
        events = ResponseEvents(body.source, options)
        return dialect_stream(events, ErrorForm.RESPONSES, generation, first, options)

    def whole(self, body: TranslatedChat, options: AnswerOptions) -> WholeAnswer:
        return TranslatedAnswer(options, ResponseEvents(body.source, options))


class MessagesAnswers:
    """The answers to ``/v1/messages``."""

    grouped = True

    def stream(
        self,
        body: TranslatedChat,  # nothing of the request comes back
        generation: TextGeneration,
        first: Sequence[TextDelta],
        options: AnswerOptions,
    ) -> AsyncGenerator[bytes, None]:
        return dialect_stream(MessageEvents(options), ErrorForm.ANTHROPIC, generation, first, options)

    def whole(self, body: TranslatedChat, options: AnswerOptions) -> WholeAnswer:
        return TranslatedAnswer(options, MessageEvents(options))
