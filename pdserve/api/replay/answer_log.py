"""The log of one replayable answer: its producer writes to it as to a client, and clients read it at their own speed.

A client gets so many bytes at a time as its connection takes, and the producer waits where the log is long and a reader
is slow. A log that is too long drops its beginning, of which the journal's entries stay, or is stored no longer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.control.journal import JOURNALED_ANSWER, cut_move_lines, move_line
from pdserve.errors import Gone, TooManyRequests, Unavailable
from pdserve.http.request import PIECE_BYTES, HttpRequest, Reply
from pdserve.patience import PatientTimer
from pdserve.wire.replay import REPLAY_HEADER, Replay, event_id_start
from pdserve.wire.terms import AnswerIdentity, EventPlace, Keep

if TYPE_CHECKING:
    from pdserve.api.replay.replayable_answers import ReplayableAnswers

log = logging.getLogger(__name__)

OVERHEAD_BYTES = 2_048
"""What counts for an answer beside its bytes."""
SMALL_BYTES = 64 * 1024
"""An answer may take so much, whatever the others take: no client can stop the answers of others by reading slowly."""
MAX_READERS = 8
"""The connections that may read one answer at once: each may have some of it that it has not taken yet."""

_MOVE = b":move "


@dataclass(slots=True, eq=False)
class _Reader:
    """One client that reads an answer."""

    position: int = 0
    """How many events, or pieces, it has."""
    wishes: int = 0
    """How many wishes for blocks elsewhere it has received."""


class ReplayableAnswer(Reply):
    """The log of one answer: what its producer writes, as a ``Reply``, and what readers get of it."""

    def __init__(
        self, keep: Keep, answer: AnswerIdentity, label: str, path: str, client: bytes, store: ReplayableAnswers
    ) -> None:
        """``client`` stands for the one for whom it is computed."""
        self.keep = keep
        self.client = client
        self.places = 1
        """How many places of the engine's batch it takes while it is computed."""
        self.label = label
        self.path = path
        self.answered = False
        self.spoilt = False
        """Whether nobody should get the answer again: it failed, or it broke off."""
        self.leaves = False
        """Whether its node wishes that another one goes on with it."""
        self.over = False
        self.size = OVERHEAD_BYTES
        self.task: asyncio.Task[None] | None = None
        self.timer: PatientTimer | None = None
        self.readers: set[_Reader] = set()
        self._answer = answer
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._tag = secrets.token_hex(2)
        self._ids = event_id_start(keep.key, self._tag)
        self._journaled = False
        self._too_long = False
        """Whether it is too long to be stored: what its readers have is dropped, and nobody can ask for it again."""
        self._start = 0
        self._first = 0
        """How many events, or pieces, come before the first one in ``_pieces``."""
        self._pieces: list[bytes] = []
        self._before = bytearray()
        """The journal's entries of the events before the first piece."""
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._complete: bytes | None = None
        self._streamed = False
        self._failure: Exception | None = None
        self._wish = b""
        self._wishes = 0
        self._news: set[asyncio.Future[None]] = set()

    @property
    def full(self) -> bool:
        """Whether its producer should wait until readers have taken some of it."""
        return self.size > self._store.share_bytes or (self._store.overdrawn and self.size > SMALL_BYTES)

    @property
    def begins_late(self) -> bool:
        """Whether the log has no beginning, because another node has written it, or it was too long."""
        return self._streamed and self._first > 0

    # ------------------------------------------------------------------ the producer's side

    def describe(self, *, journaled: bool, events: int, entries: bytes, places: int = 1) -> None:
        """Says, before the answer begins, whether it has a journal, and what another node has written of it.

        ``places`` are those of the engine's batch that it takes.
        """
        self.places = places
        if not self.readers:
            self._store.left(self)  # again, now that it is known to be so large
        self._journaled = journaled
        self._start = self._first = events
        self._before += b"".join([b":%b\n" % line for line in entries.splitlines()])
        self._grow(len(self._before))

    async def begin(self, status: int, headers: Mapping[str, str], data: bytes, *, more: bool) -> None:
        self.answered = True
        self._status, self._headers = status, headers
        self._streamed = headers.get("content-type") != JOURNALED_ANSWER
        if not self._streamed:
            self._first = 0
        self._add(data)
        self._end(more)

    def write(self, data: bytes) -> bool:
        self._add(data)
        self.wake()
        return not self.full

    async def send(self, data: bytes, *, more: bool) -> None:
        self._add(data)
        self._end(more)
        if more and self.full:
            await self.drain()

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.answered = True
        self._status, self._headers, self._complete = status, headers, body
        if self.size + len(body) > self._store.share_bytes:
            self._store.discard(self)  # those who read it now get it; it would push out what others have
        else:
            self._grow(len(body))
        self._end(False)

    async def drain(self) -> None:
        """Waits until readers have taken so much that the log is below its limit again. Without readers it is given up.

        An answer that takes too much although its readers have all of it is stored no longer, or it would never go on.
        """
        while self.full and not self._trim():
            if not self.readers:
                self._store.discard(self)
                await asyncio.sleep(0)  # which is where this task is cancelled
            elif not self._too_long and not self._has_unread:
                self._stop_storing()
                continue
            await self._wait()

    def fail(self, failure: Exception) -> None:
        """Ends the answer, which readers get as an error if it has not begun, and else as a connection that breaks."""
        self._failure = failure
        self.spoilt = True
        self._end(False)

    def _add(self, data: bytes) -> None:
        if not self._streamed:
            data, tokens = cut_move_lines(data)
            self._want_move(move_line(tokens))
            pieces = [data] if data else []
        elif data.startswith(_MOVE):
            self._want_move(data)
            return
        else:
            pieces = [self._numbered(event, number) for number, event in enumerate(data.split(b"\n\n")[:-1], 1)]
        self._pieces += pieces
        self._grow(sum(map(len, pieces)))

    def _numbered(self, event: bytes, number: int) -> bytes:
        number += self._first + len(self._pieces)
        if not event.startswith(b":"):
            # In a journaled stream, an event without an entry is the error with which it ends.
            return event + b"\n\n" if self._journaled else b"id: %b%d\n%b\n\n" % (self._ids, number, event)
        entry, _, shown = event.partition(b"\n")
        return b"%b\nid: %b%d\n%b\n\n" % (entry, self._ids, number, shown)

    def _want_move(self, wish: bytes) -> None:
        if wish:
            self.leaves, self._wish = True, wish
            self._wishes += 1

    def _grow(self, size: int) -> None:
        self.size += size
        self._store.grew(self, size)

    def _trim(self) -> bool:
        """Drops the oldest events that all readers have, while they take too much. Returns whether more may come."""
        if not (self._streamed or self._too_long) or not self.readers:
            return False
        least = SMALL_BYTES // 2 if self._store.overdrawn else self._store.share_bytes // 2
        read = min(reader.position for reader in self.readers) - self._first
        count = dropped = 0
        while count < read and self.size - dropped > least:
            dropped += len(self._pieces[count])
            count += 1
        entries = b"" if self._too_long else self._entries(count)
        self._before += entries
        del self._pieces[:count]
        self._first += count
        self._grow(len(entries) - dropped)
        return not self.full

    @property
    def _has_unread(self) -> bool:
        """Whether a reader does not have all of it."""
        return min(reader.position for reader in self.readers) < self._first + len(self._pieces)

    def _stop_storing(self) -> None:
        self._too_long = True
        self._store.discard(self)
        self._grow(-len(self._before))
        self._before.clear()

    def _end(self, more: bool) -> None:
        self.over = not more
        self.wake()

    # ------------------------------------------------------------------ the readers' side

    async def follow(self, request: HttpRequest, after: EventPlace | None, *, first: bool = False) -> None:
        """Sends the answer to a client, from ``after`` or from its beginning, until it is over.

        The ``first`` client is the one for which it is computed. Raises what the answer fails with, Gone, and
        TooManyRequests.
        """
        if len(self.readers) >= MAX_READERS:
            raise TooManyRequests(
                f"{MAX_READERS} connections read this answer already: close one of them, or wait until one has all",
                code="too_many_readers",
                retry_after_s=1,
            )
        if not first:
            log.info("request_id=%s gets the answer of request_id=%s", request.label, self.label)
        reader = _Reader()
        self.readers.add(reader)
        self._store.read(self)
        try:
            await self._follow(request, reader, after, first=first)
        finally:
            self.readers.discard(reader)
            self.wake()
            if not self.readers:
                self._store.left(self)

    async def _follow(self, request: HttpRequest, reader: _Reader, after: EventPlace | None, *, first: bool) -> None:
        while not self.answered and not self.over:
            await self._wait()
        if not self.answered:
            assert self._failure is not None
            raise self._failure
        if self._complete is not None:
            await request.respond(self._status, self._headers, self._complete)
            return
        reader.position = self._first if first else self._position(after)
        if first:
            await request.begin(self._status, self._headers, self._next(reader), more=True)
        else:
            await self._begin_again(request, reader)
        while True:
            data = self._next(reader)
            if data:
                if not request.write(data):
                    await request.drain()
            elif self.over:
                break
            else:
                await self._wait()
        if self._failure is not None:
            raise self._failure
        await request.send(b"", more=False)

    async def _begin_again(self, request: HttpRequest, reader: _Reader) -> None:
        """Sends the head of the response, and the journal's entries of the events that the client has."""
        entries = bytes(self._before) + (self._entries(reader.position - self._first) if self._streamed else b"")
        replay = Replay(self._answer, len(entries) if self._streamed else 0)
        headers = {**self._headers, REPLAY_HEADER: replay.header()}
        # This reader's copy of them takes memory, but the log is no longer for it: the producer does not wait for that.
        self._store.grew(self, len(entries))
        try:
            await request.begin(self._status, headers, entries[:PIECE_BYTES], more=True)
            for start in range(PIECE_BYTES, len(entries), PIECE_BYTES):
                if not request.write(entries[start : start + PIECE_BYTES]):
                    await request.drain()
        finally:
            self._store.grew(self, -len(entries))

    def _position(self, after: EventPlace | None) -> int:
        """Returns how many events a client has that asks for those behind ``after``. Raises Gone and Unavailable."""
        if not self._streamed:
            return 0
        if after is None:
            if self._first:
                raise Unavailable("this node has the end of the answer only", code="answer_not_kept", retry_after_s=1)
            return 0
        known = self._first <= after.events <= self._first + len(self._pieces)
        # What a log begins behind is in the logs before it, under their tags.
        if not known or (after.tag != self._tag and after.events != self._start):
            raise events_gone()
        return after.events

    def _next(self, reader: _Reader) -> bytes:
        """Returns some of what ``reader`` does not have yet, and counts it as read."""
        start = end = reader.position - self._first
        size = 0
        while end < len(self._pieces) and size < PIECE_BYTES:
            size += len(self._pieces[end])
            end += 1
        reader.position += end - start
        if end > start and self.full:
            self.wake()  # the producer may wait until the log is below its limit
        wish = self._wish if reader.wishes != self._wishes and not self.over else b""
        reader.wishes = self._wishes
        return b"".join(self._pieces[start:end]) + wish

    def _entries(self, count: int) -> bytes:
        """Returns the journal's entries of the first ``count`` pieces."""
        return b"".join([piece.partition(b"\n")[0] + b"\n" for piece in self._pieces[:count] if piece.startswith(b":")])

    def wake(self) -> None:
        """Has the producer and the readers look again."""
        for waiter in self._news:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._news.add(waiter)
        try:
            await waiter
        finally:
            self._news.discard(waiter)


def events_gone() -> Gone:
    """Returns the error for a client whose events cannot be found."""
    return Gone(
        "the events behind this Last-Event-ID are not stored any more: send the request without it",
        code="answer_not_kept",
    )
