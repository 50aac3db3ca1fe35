"""What the routes of the dialects answer with: a parser of their requests, and the answers to them.

Another node can go on behind any event of a dialect's stream. Every event has an entry of its own
(``control.journal``). One delta may bring several events: they are a *group*. The entry of the group's first event
names all of its tokens, and the entries of the others name none:

    :0 314 8              a block ends
    :0                    the next one begins
    :0                    its first text
    :0 2290               more text
    …
    :done                 the last event

So a journal that ends within a group has all tokens of that group. The node that goes on makes the group once more, out
of the same tokens, and leaves out the events that the client has. No entry says that the choice is over, because the
events after the last text are a group too: the node that goes on learns from the tokens that they end the answer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from pdserve.api.answers.answer import CompleteAnswer, usage_of
from pdserve.api.answers.answer_form import CHAT_FORM, AnswerOptions
from pdserve.api.answers.logprobs import ShownToken
from pdserve.api.answers.openai_response import Usage
from pdserve.api.answers.text_generation import TextDelta, TextGeneration
from pdserve.api.dialects.answer_blocks import AnswerBlocks, BlockEvents, answer_end
from pdserve.api.dialects.dialect_request import DialectRequest, TranslatedChat
from pdserve.api.dialects.messages_answer import MessageEvents
from pdserve.api.dialects.responses_answer import ResponseEvents
from pdserve.api.requests.openai_request import BodyParser, Parsed
from pdserve.control.journal import DONE_ENTRY, Journal, JournaledChoice, entry
from pdserve.errors import InvalidRequest, RequestError
from pdserve.http.errors import ErrorForm, error_event, internal_error

_encoder = msgspec.json.Encoder()


class EventGroups:
    """Encodes the events of one stream. Each event is a struct whose tag is the event's name."""

    def __init__(self, journal: Journal, *, journaled: bool, numbered: bool) -> None:
        """``journal`` is what the client has from other nodes. Where events are ``numbered``, each says its place."""
        choice = journal.choices.get(0, JournaledChoice())
        self._repeated = len(choice.last_group)
        """How many tokens of the next group have an entry."""
        self._skip = choice.empty_since + bool(choice.groups)
        """How many events of the next groups the client has."""
        self._journaled = journaled
        self._numbered = numbered
        self._unwritten: Sequence[int] = ()
        """The tokens that no entry has yet, because no event shows them."""
        self.number = journal.events
        """The number of events that the client has."""

    def write(self, token_ids: Sequence[int], events: Sequence[msgspec.Struct], *, last: bool = False) -> bytes:
        """Returns the events of ``token_ids`` that the client lacks. The ``last`` group ends the stream."""
        lacking = events[self._skip :]
        self._skip -= len(events) - len(lacking)
        token_ids, self._repeated = token_ids[self._repeated :], 0
        token_ids = [*self._unwritten, *token_ids] if self._unwritten else token_ids
        self._unwritten = () if lacking else token_ids
        parts = []
        for place, event in enumerate(lacking, 1):
            if self._journaled:
                parts.append(DONE_ENTRY if last and place == len(lacking) else entry(0, token_ids))
                token_ids = ()
            parts.append(self._encode(event))
        return b"".join(parts)

    def write_unjournaled(self, events: Sequence[msgspec.Struct]) -> bytes:
        """Returns events behind which no node goes on."""
        return b"".join(map(self._encode, events))

    def _encode(self, event: msgspec.Struct) -> bytes:
        data = _encoder.encode(event)
        if self._numbered:
            data = b'%b,"sequence_number":%d}' % (data[:-1], self.number)
        self.number += 1
        return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), data)


log = logging.getLogger(__name__)


async def _dialect_stream(
    events: BlockEvents, form: ErrorForm, generation: TextGeneration, first: Sequence[TextDelta], options: AnswerOptions
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events: one item for each time that the engine had something.

    The caller still has to close ``generation``. Raises RequestError if there is no answer and no event before that.
    """
    blocks = AnswerBlocks(events, options)
    groups = EventGroups(options.journal, journaled=options.journaled, numbered=form is ErrorForm.RESPONSES)
    for resumed in options.resumed:
        blocks.add(resumed)  # the client has these events
    begun, deltas = False, first
    try:
        while True:
            data = b""
            for delta in deltas:
                shown = blocks.add(delta)
                last = delta.outcome is not None and delta.outcome.is_answer
                if last:
                    shown += blocks.end(answer_end(delta, usage_of(generation)))
                data += groups.write(delta.token_ids, shown, last=last)
            if data:
                begun = True
                yield data
            if generation.done and generation.failure is None:
                return
            deltas = await generation.next()
    except RequestError as error:
        if not begun:
            raise
        # A journaled stream that ends without its end is one that another node is to go on with.
        if not (options.journaled and generation.node_failed):
            yield _failed(error, blocks, groups, form, generation.record.request_id)
    except Exception:
        # Status 200 has gone out: the client learns of a defect here or not at all.
        log.exception("request_id=%s unexpected error in a stream", generation.record.request_id)
        yield error_event(internal_error("node"), form, groups.number, generation.record.request_id)


def _failed(error: RequestError, blocks: AnswerBlocks, groups: EventGroups, form: ErrorForm, label: str) -> bytes:
    """Returns the last event of a stream that breaks off."""
    return groups.write_unjournaled(blocks.fail(error)) or error_event(error, form, groups.number, label)


S = TypeVar("S", bound=DialectRequest)


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


class TranslatedAnswer(CompleteAnswer):
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
        return msgspec.json.encode(self._events.complete(self._blocks.complete(), answer_end(self._last, usage)))


class ResponsesAnswers:
    """The answers to ``/v1/responses``."""

    grouped = True

    def stream(
        self, body: TranslatedChat, generation: TextGeneration, first: Sequence[TextDelta], options: AnswerOptions
    ) -> AsyncGenerator[bytes, None]:
        events = ResponseEvents(body.source, options)
        return _dialect_stream(events, ErrorForm.RESPONSES, generation, first, options)

    def complete(self, body: TranslatedChat, options: AnswerOptions) -> CompleteAnswer:
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
        return _dialect_stream(MessageEvents(options), ErrorForm.ANTHROPIC, generation, first, options)

    def complete(self, body: TranslatedChat, options: AnswerOptions) -> CompleteAnswer:
        return TranslatedAnswer(options, MessageEvents(options))
