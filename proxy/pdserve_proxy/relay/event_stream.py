"""Relays the body of a streamed response: complete server-sent events, of another node once the first one is lost.

The relay looks for the ends of events and for journal entries only. It does not parse what a client gets, but for the
error event with which a node ended its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from pdserve.errors import BadUpstream
from pdserve.http.errors import error_event, error_form
from pdserve_proxy.continuation.journal import JournaledEvents, ReplayedEvents
from pdserve_proxy.continuation.resume import ResumeFailed, Resumption
from pdserve_proxy.relay.complete_events import BEGINNING_BYTES, CompleteEvents
from pdserve_proxy.relay.outcomes import RelayOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse

log = logging.getLogger(__name__)

_ERROR_LINES = frozenset({b"event: error", b"event: response.failed"})
_CLIENTS_ERRORS = frozenset({"invalid_request_error", "invalid_prompt"})
"""The type of the client's own errors, and their code in a failed response."""
_LATE_ERRORS = frozenset({"timeout_error", "deadline_exceeded"})
"""The type of the error of a request that is past its time, and its code, which is all that ``/v1/responses`` has."""


class EventStream:
    """The body of one streamed response, for one reader.

    The reader calls ``open``, sends ``first``, calls ``next`` until ``over`` is true, and then ``end``.
    """

    def __init__(
        self,
        relayed: RelayedRequest,
        response: NodeResponse,
        resumption: Resumption | None = None,
        journal_bytes: int = 0,
    ) -> None:
        """Without ``resumption``, the loss of the node ends the stream.

        The response begins with ``journal_bytes`` of the entries of events that its client has.
        """
        self._relayed = relayed
        self._response = response
        self._resumption = resumption
        self._journal = None if resumption is None else resumption.journal
        self._events = self._new_events()
        if journal_bytes and self._journal is not None:
            self._events = ReplayedEvents(self._journal, journal_bytes)
        self._last = b""
        """The events that the client got last, or the last one of many."""
        self.first = b""
        self.over = False
        """Whether the bytes that were returned last are the end of the body."""

    async def open(self) -> None:
        """Waits for the first event, so that a node lost before it can still be replaced. Raises NodeLost."""
        while not self.first and not self.over:
            self.first = self._complete(await self._response.read())
        self._relayed.relayed_bytes += len(self.first)
        self._note_last(self.first)

    async def next(self, write: Callable[[bytes], bool]) -> bytes:
        """Returns complete events, or nothing if there are none now; if nobody goes on after a loss, an error event.

        Events in the middle of a stream go to ``write`` as they come, without waking the task that waits here, until
        ``write`` returns False.
        """

        feed, relayed = self._events.feed, self._relayed

        def relay(piece: bytes) -> bool:
            data = feed(piece)
            size = len(data)
            relayed.relayed_bytes += size
            if size > BEGINNING_BYTES:
                self._note_last(data)
            elif size:
                self._last = data
            return not data or write(data)

        try:
            data = self._complete(await self._response.read(relay))
        except NodeLost as exc:
            data = await self._after_loss(exc)
        self._relayed.relayed_bytes += len(data)
        self._note_last(data)
        return data

    def end(self) -> None:
        """Ends the request, whose client has the complete body, unless a loss has ended it already."""
        # Of an error event that was too long to be held back, the last bytes do not tell. No event follows it.
        failed = error_outcome(last_event(self._last)) or error_outcome(self._events.long_event)
        self._relayed.end(failed or RelayOutcome.OK)

    def _note_last(self, events: bytes) -> None:
        if events:
            self._last = events if len(events) <= BEGINNING_BYTES else last_event(events) + b"\n\n"

    def _new_events(self) -> CompleteEvents:
        return CompleteEvents() if self._journal is None else JournaledEvents(self._journal)

    def _complete(self, piece: bytes) -> bytes:
        """Returns the events that ``piece`` completes. Raises NodeLost if the node ended the stream too early."""
        data = self._events.feed(piece) if piece else b""
        if self._response.exhausted:
            journal = self._journal
            if journal is None or not journal.lacks_end:
                self.over = True
                data += self._events.rest()
            elif not data:
                raise NodeLost("it ended the stream without its end")
        return data

    async def _after_loss(self, loss: NodeLost) -> bytes:
        relayed, journal = self._relayed, self._journal
        # The entry of an event that is too long to be held back comes before the event's end.
        if journal is not None and journal.done and not self._events.inside:
            # Its client has all of it, also where the request was cut short while the end of the body was on its way.
            self.over = True
            return b""
        if relayed.cut_short is None:
            if self._resumption is None or not self._resumption.planned:
                reason = loss or repr(loss)
                relayed.node_lost()
                log.warning(
                    "request_id=%s decode=%s lost while streaming: %s", relayed.request_id, relayed.decode_name, reason
                )
            if self._resumption is not None:
                try:
                    return await self._resumption.go_on(self._begin)
                except ResumeFailed as exc:
                    log.warning("request_id=%s does not go on: %s", relayed.request_id, exc)
                except asyncio.CancelledError:
                    if not relayed.takes_cancel_as_cut():
                        raise
        return self._broken()

    async def _begin(self, response: NodeResponse) -> bytes:
        """Returns the first events of ``response``, which goes on with the stream. Raises NodeLost."""
        self._response = response
        self._events = self._new_events()
        data = b""
        while not data and not self.over:
            data = self._complete(await response.read())
        self._relayed.got_byte()
        self._relayed.begin_relaying(response.status)
        return data

    def _broken(self) -> bytes:
        """Ends the request and returns the last event of its stream."""
        self.over = True
        data = self._events.close_broken()
        number = 0 if self._journal is None else self._journal.count  # before the end of the request frees the journal
        if self._relayed.cut_short is not None:
            error, outcome = self._relayed.cut_short.error, self._relayed.cut_short.outcome
        else:
            error = BadUpstream("the node that served this request was lost", code="upstream_lost")
            outcome = RelayOutcome.UPSTREAM_LOST
        self._relayed.error = error
        self._relayed.end(outcome)
        return data + error_event(error, error_form(self._relayed.path), number, self._relayed.request_id)


class _Error(msgspec.Struct):
    type: str | None = None
    code: str | None = None


class _FailedResponse(msgspec.Struct):
    error: _Error | None = None


class _ErrorEvent(msgspec.Struct):
    """What the error events of all routes have in common: each has one of these."""

    code: str | None = None
    error: _Error | None = None
    response: _FailedResponse | None = None


_decoder = msgspec.json.Decoder(_ErrorEvent)


def last_event(events: bytes) -> bytes:
    """Returns the beginning of the last one of complete ``events``, without its end."""
    start = events.rfind(b"\n\n", 0, -2)
    start = 0 if start < 0 else start + 2
    return events[start : min(len(events) - 2, start + BEGINNING_BYTES)]


def error_outcome(event: bytes) -> RelayOutcome | None:
    """Returns how a stream ended whose last event is this; None if it is no error event."""
    *fields, data = event.split(b"\n")
    if _ERROR_LINES.isdisjoint(fields):
        return None
    names = _names_of(data.removeprefix(b"data: "))
    if not _CLIENTS_ERRORS.isdisjoint(names):
        return RelayOutcome.REFUSED
    return RelayOutcome.UPSTREAM_FAILED if _LATE_ERRORS.isdisjoint(names) else RelayOutcome.TIMED_OUT


def _names_of(data: bytes) -> tuple[str | None, ...]:
    """Returns the type and codes of an error. One that cannot be read has none, and so counts as the node's."""
    try:
        event = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()
    error = event.error if event.response is None else event.response.error
    return (event.code,) if error is None else (event.code, error.type, error.code)
