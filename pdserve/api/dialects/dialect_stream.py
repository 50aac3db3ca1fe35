"""Streams an answer in a dialect."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence

from pdserve.api.answers.answer import usage_of
from pdserve.api.answers.answer_form import AnswerOptions
from pdserve.api.answers.text_generation import TextDelta, TextGeneration
from pdserve.api.dialects.answer_blocks import AnswerBlocks, BlockEvents, answer_end
from pdserve.api.dialects.event_groups import EventGroups
from pdserve.errors import RequestError
from pdserve.http.errors import ErrorForm, error_event, internal_error

log = logging.getLogger(__name__)


async def dialect_stream(
    events: BlockEvents,
    form: ErrorForm,
    generation: TextGeneration,
    first: Sequence[TextDelta],
    options: AnswerOptions,
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
