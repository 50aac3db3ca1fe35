"""Relays the body of a streamed response: complete server-sent events, of another node once the first one is lost.

A stream is cut at the ends of its events (``CompleteEvents``), and the journal's entries are cut off
(``JournaledEvents``). The relay looks for these only. It does not parse what a client gets, but for the error event
with which a node ended its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from pdserve.control.journal import cut, cut_move_blocks
from pdserve.errors import BadUpstream
from pdserve.http.errors import error_event, error_form
from pdserve_proxy.continuation.journal import DropReason, RelayJournal
from pdserve_proxy.continuation.resume import ResumeFailed, Resumption
from pdserve_proxy.relay.outcomes import RelayOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse

log = logging.getLogger(__name__)

_ERROR_LINES = frozenset({b"event: error", b"event: response.failed"})
_CLIENTS_ERRORS = frozenset({"invalid_request_error", "invalid_prompt"})
"""The type of the client's own errors, and their code in a failed response."""
_LATE_ERRORS = frozenset({"timeout_error", "deadline_exceeded"})
"""The type of the error of a request that is past its time, and its code, which is all that ``/v1/responses`` has."""

MAX_EVENT_BYTES = 2**20
BEGINNING_BYTES = 2**16
"""So much is looked at of an event that may be the last. That of a failed response says all that it had."""

_ENDINGS = (b"\n\n", b"\r\n\r\n")
_LONGEST_ENDING = 4


class CompleteEvents:
    """Passes a byte stream on in pieces that end where an event ends.

    A client then never holds half an event when its stream breaks, and an error event can always follow. Nodes write
    complete events, so nearly every piece passes unchanged. At most ``MAX_EVENT_BYTES`` of an event are held back. The
    work per byte is constant, however the stream is cut.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """The pieces of an event whose end has not come."""
        self._held_bytes = 0
        self._tail = b""
        """The last bytes of that event, which may be the beginning of its ending."""
        self._inside = False
        """Whether the client has the beginning of that event already."""
        self.long_event = b""
        """The beginning of the last event that was passed on in parts; empty if there was none."""

    @property
    def inside(self) -> bool:
        """Whether the client has the beginning of an event, and not its end."""
        return self._inside

    def feed(self, piece: bytes) -> bytes:
        """Returns the bytes that can be sent on now, which may be none."""
        seam = self._tail + piece if self._tail else piece
        if seam.endswith(_ENDINGS):
            return self._release(piece, b"")
        end = max(seam.rfind(ending) + len(ending) if ending in seam else 0 for ending in _ENDINGS)
        if end:
            end -= len(seam) - len(piece)
            rest = piece[end:]
            out = self._release(piece[:end], rest)
            if len(rest) <= MAX_EVENT_BYTES:
                self._hold(rest)
                return out
            self._begin_parts(rest)
            return out + rest
        self._hold(piece)
        self._tail = seam[1 - _LONGEST_ENDING :]
        if self._held_bytes <= MAX_EVENT_BYTES:
            return b""
        held = self._take()
        if not self._inside:
            self._begin_parts(held)
        return held

    def rest(self) -> bytes:
        """Returns the bytes that are held back, for a stream that ended in good order."""
        return self._take()

    def close_broken(self) -> bytes:
        """Drops the bytes that are held back, and returns what has to precede an error event in a broken stream."""
        self._take()
        return b"\n\n" if self._inside else b""

    def _release(self, last: bytes, rest: bytes) -> bytes:
        """Returns the held bytes and ``last``, which ends an event. ``rest`` begins the next event."""
        self._tail = rest[1 - _LONGEST_ENDING :]
        self._inside = False
        return self._take() + last if self._held else last

    def _begin_parts(self, beginning: bytes) -> None:
        self._inside = True
        self.long_event = beginning[:BEGINNING_BYTES]

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)

    def _take(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return held


class JournaledEvents(CompleteEvents):
    """Passes a byte stream on in complete events, without their entries, which go to a journal.

    An event without an entry is one with which the node ends its stream itself, like an error event, or it comes from a
    node that writes no journal. Such a stream is not resumed.
    """

    def __init__(self, journal: RelayJournal) -> None:
        super().__init__()
        self._journal = journal
        self._keep = journal.keep

    def feed(self, piece: bytes) -> bytes:
        # Every token of every client passes here, so what nearly every piece is comes first, in calls that cost little.
        if not self._tail and piece[:1] == b":":
            entry, _, event = piece.partition(b"\n")
            if event.partition(b"\n")[2] == b"\n":  # one event, of one line
                self._keep(entry)
                return event
            lines = piece.split(b"\n")
            entries, count = b"\n".join(lines[::3]), len(lines) // 3
            # Several of these: an entry, a line and an empty line each, and nothing behind the last end of line.
            complete = len(lines) == 3 * count + 1 and not lines[-1] and not any(lines[2::3])
            if complete and entries.count(b"\n:") == count - 1:
                self._keep(entries)
                return b"\n\n".join(lines[1::3]) + b"\n\n"
        # Of an event that is not held back any more, the client has the beginning, and ``_tail`` ends that.
        before = b"-" + self._tail if self._inside else b""
        return self._cut(before, super().feed(piece))

    def rest(self) -> bytes:
        before = b"-" + self._tail if self._inside else b""
        return self._cut(before, super().rest())

    def _cut(self, before: bytes, events: bytes) -> bytes:
        """Returns ``events``, which follow ``before``, without entries."""
        if not before:
            events, tokens = cut_move_blocks(events)
            self._journal.want_blocks(tokens)
        if not events:
            return b""
        shown, entries = cut(before + events)
        if (self._inside or before) and self.long_event.startswith(b":"):
            self._journal.drop(DropReason.EVENT)
        elif self._inside or before or shown.count(b"\n\n") != entries.count(b"\n"):
            self._journal.add_entryless()
        self._journal.add(entries)
        return shown[len(before) :]


class ReplayedEvents(JournaledEvents):
    """Does what ``JournaledEvents`` does, for a stream that begins with the entries of events that its client has."""

    def __init__(self, journal: RelayJournal, journal_bytes: int) -> None:
        super().__init__(journal)
        self._journal_bytes = journal_bytes
        """How many bytes of entries are still to come."""

    def feed(self, piece: bytes) -> bytes:
        if self._journal_bytes:
            entries, piece = piece[: self._journal_bytes], piece[self._journal_bytes :]
            self._journal_bytes -= len(entries)
            self._keep(entries)
        return super().feed(piece) if piece else b""


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
                relayed.node_lost()
                log.warning(
                    "request_id=%s decode=%s lost while streaming: %s", relayed.request_id, relayed.decode_name, loss
                )
            if self._resumption is not None:
                try:
                    return await self._resumption.go_on(self._begin, loss)
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
