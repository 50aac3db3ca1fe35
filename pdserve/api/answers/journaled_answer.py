"""Sends an answer in one piece with a journal before it, if it is not ready soon (``pdserve.wire.whole_answer``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import msgspec

from pdserve.api.answers.answer import WholeAnswer, usage_of
from pdserve.api.answers.text_generation import TextDelta, TextGeneration
from pdserve.errors import RequestError
from pdserve.http.errors import error_body, error_form, error_headers, internal_error
from pdserve.http.request import JSON, PIECE_BYTES, Reply
from pdserve.wire.journal import room_line
from pdserve.wire.whole_answer import JOURNALED_ANSWER, AnswerHead

JOURNAL_INTERVAL_S = 0.25
"""The time from one write of entries to the next, and from the first token to the first of them."""

log = logging.getLogger(__name__)


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
    answer: WholeAnswer,
) -> None:
    """Sends the whole answer with ``headers``, and before it a journal if it takes long.

    The caller still has to close ``generation``. Raises RequestError if there is no answer and no byte has gone out.
    """
    answer.add(first)
    while (ended := await _end_within(JOURNAL_INTERVAL_S, request, headers, generation, answer)) is None:
        await _send_entries(request, answer.entries() + room_line(generation.take_room()))
    if ended.head is None:
        await request.send(b"", more=False)
    elif request.answered:
        await _send_last(request, ended.head.encode() + ended.body)
    else:
        await request.respond(ended.head.status, ended.head.headers, ended.body)


async def _end_within(
    seconds: float,
    request: Reply,
    headers: Mapping[str, str],
    generation: TextGeneration,
    answer: WholeAnswer,
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
