"""Keeps answers for clients that may ask again: the answer is written to a log, and each client reads the log.

    find ──▶ none ──▶ open ──▶ follow …             a new request: its answer is computed in a task of its own
    find ──▶ an answer ──▶ follow …                 the client asks again: it gets what it lacks, and then goes on live
             follow ──▶ its client, or the client's proxy, is gone ──▶ the answer is computed on, for ``keep_s``
             follow ──▶ the answer is over ──▶ it is kept for ``keep_s``

Only requests that say so have such a log (``pdserve.wire.kept_answer``): any other ends with its client, at once.

What strangers can cause is bounded: the number of answers, their memory, and the time and the number of those that are
computed for nobody. An old answer that is over makes room for a new one, first among those of the owner who has most.
An answer that has to leave this node is not computed on: the proxy that takes it elsewhere closes its connection, too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.errors import Gone, KeyReused, Unavailable
from pdserve.http.request import HttpRequest, Reply
from pdserve.wire.journal import cut_room_lines, room_line
from pdserve.wire.kept_answer import KEPT_HEADER, Replay, event_id_start
from pdserve.wire.ticket import AnswerIdentity, EventPlace, Keep
from pdserve.wire.whole_answer import JOURNALED_ANSWER

log = logging.getLogger(__name__)

SHARE = 8
"""One answer may take this part of the memory."""
UNREAD_SHARE = 2
"""One owner's part of the answers that are computed while nobody reads them."""
OVERHEAD_BYTES = 2_048
"""What counts for an answer beside its bytes."""
SMALL_BYTES = 64 * 1024
"""An answer may take so much, whatever the others take: no client can stop the answers of others by reading slowly."""

_ROOM = b":room "


@dataclass(frozen=True, slots=True)
class KeptLimits:
    """The bounds of what a node keeps."""

    answers: int
    memory_bytes: int
    keep_s: float


@dataclass(slots=True, eq=False)
class _Reader:
    """One client that reads an answer."""

    position: int = 0
    """How many events, or pieces, it has."""
    wishes: int = 0
    """How many wishes for room it has heard of."""


class KeptAnswer(Reply):
    """The log of one answer: what its producer writes, as a ``Reply``, and what readers get of it."""

    def __init__(self, keep: Keep, answer: AnswerIdentity, label: str, path: str, table: KeptAnswers) -> None:
        self.keep = keep
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
        self.timer: asyncio.TimerHandle | None = None
        self.readers: set[_Reader] = set()
        self._answer = answer
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._tag = secrets.token_hex(2)
        self._ids = event_id_start(keep.key, self._tag)
        self._journaled = False
        self._unkept = False
        """Whether it is too long to be kept: what its readers have is dropped, and nobody can ask for it again."""
        self._start = 0
        self._first = 0
        """How many events, or pieces, come before the first one in ``_pieces``."""
        self._pieces: list[bytes] = []
        self._before = bytearray()
        """The journal's entries of the events before the first piece."""
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._whole: bytes | None = None
        self._streamed = False
        self._failure: Exception | None = None
        self._wish = b""
        self._wishes = 0
        self._news: set[asyncio.Future[None]] = set()

    @property
    def full(self) -> bool:
        """Whether its producer should wait until readers have taken some of it."""
        return self.size > self._table.share_bytes or (self._table.overdrawn and self.size > SMALL_BYTES)

    @property
    def begins_late(self) -> bool:
        """Whether the log has no beginning, because another node has written it, or it was too long."""
        return self._streamed and self._first > 0

    # ------------------------------------------------------------------ the producer's side

    def describe(self, *, journaled: bool, events: int, entries: bytes) -> None:
        """Says, before the answer begins, whether it has a journal, and what another node has written of it."""
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
        self._status, self._headers, self._whole = status, headers, body
        if self.size + len(body) > self._table.share_bytes:
            self._table.discard(self)  # those who read it now get it; it would push out what others have
        else:
            self._grow(len(body))
        self._end(False)

    async def drain(self) -> None:
        """Waits until readers have taken so much that the log has room again. Without readers it is given up.

        An answer that takes too much although its readers have all of it is kept no longer, or it would never go on.
        """
        while self.full and not self._trim():
            if not self.readers:
                self._table.discard(self)
                await asyncio.sleep(0)  # which is where this task is cancelled
            elif not self._unkept and not self._has_unread:
                self._stop_keeping()
                continue
            await self._wait()

    def fail(self, failure: Exception) -> None:
        """Ends the answer, which readers get as an error if it has not begun, and else as a connection that breaks."""
        self._failure = failure
        self.spoilt = True
        self._end(False)

    def _add(self, data: bytes) -> None:
        if not self._streamed:
            data, tokens = cut_room_lines(data)
            self._want_room(room_line(tokens))
            pieces = [data] if data else []
        elif data.startswith(_ROOM):
            self._want_room(data)
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

    def _want_room(self, wish: bytes) -> None:
        if wish:
            self.leaves, self._wish = True, wish
            self._wishes += 1

    def _grow(self, size: int) -> None:
        self.size += size
        self._table.grew(self, size)

    def _trim(self) -> bool:
        """Drops the oldest events that all readers have, while they take too much. Returns whether there is room."""
        if not (self._streamed or self._unkept) or not self.readers:
            return False
        least = SMALL_BYTES // 2 if self._table.overdrawn else self._table.share_bytes // 2
        read = min(reader.position for reader in self.readers) - self._first
        count = dropped = 0
        while count < read and self.size - dropped > least:
            dropped += len(self._pieces[count])
            count += 1
        entries = b"" if self._unkept else self._entries(count)
        self._before += entries
        del self._pieces[:count]
        self._first += count
        self._grow(len(entries) - dropped)
        return not self.full

    @property
    def _has_unread(self) -> bool:
        """Whether a reader does not have all of it."""
        return min(reader.position for reader in self.readers) < self._first + len(self._pieces)

    def _stop_keeping(self) -> None:
        self._unkept = True
        self._table.discard(self)
        self._grow(-len(self._before))
        self._before.clear()

    def _end(self, more: bool) -> None:
        self.over = not more
        self.wake()

    # ------------------------------------------------------------------ the readers' side

    async def follow(self, request: HttpRequest, after: EventPlace | None, *, first: bool = False) -> None:
        """Sends the answer to a client, from ``after`` or from its beginning, until it is over.

        The ``first`` client is the one for which it is computed. Raises what the answer fails with, and Gone.
        """
        if not first:
            log.info("request_id=%s gets the answer of request_id=%s", request.label, self.label)
        reader = _Reader()
        self.readers.add(reader)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        try:
            await self._follow(request, reader, after, first=first)
        finally:
            self.readers.discard(reader)
            self.wake()
            if not self.readers:
                self._table.unread(self)

    async def _follow(self, request: HttpRequest, reader: _Reader, after: EventPlace | None, *, first: bool) -> None:
        while not self.answered and not self.over:
            await self._wait()
        if not self.answered:
            assert self._failure is not None
            raise self._failure
        if self._whole is not None:
            await request.respond(self._status, self._headers, self._whole)
            return
        reader.position = self._first if first else self._position(after)
        head, headers = b"", dict(self._headers)
        if not first:
            head = bytes(self._before) + (self._entries(reader.position - self._first) if self._streamed else b"")
            headers[KEPT_HEADER] = Replay(self._answer, len(head) if self._streamed else 0).header()
        await request.begin(self._status, headers, head + self._next(reader), more=True)
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
            raise not_kept()
        return after.events

    def _next(self, reader: _Reader) -> bytes:
        """Returns what ``reader`` does not have yet, and counts it as read."""
        pieces = self._pieces[reader.position - self._first :] if self._pieces else []
        reader.position += len(pieces)
        if pieces and self.full:
            self.wake()  # the producer may wait for room
        wish = self._wish if reader.wishes != self._wishes and not self.over else b""
        reader.wishes = self._wishes
        return b"".join(pieces) + wish

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


class KeptAnswers:
    """The answers that one node keeps."""

    def __init__(self, limits: KeptLimits) -> None:
        self._limits = limits
        self.share_bytes = limits.memory_bytes // SHARE
        self.taken_bytes = 0
        self.replayed = 0
        """How many times a client has asked again and got the answer."""
        self._answers: dict[bytes, KeptAnswer] = {}
        """The answers by their keys, in the order in which they began."""
        self._logs: set[KeptAnswer] = set()
        """Those, and the ones that are read although they are not kept any more."""
        self._draining = False

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def overdrawn(self) -> bool:
        """Whether answers take more memory than they may."""
        return self.taken_bytes > self._limits.memory_bytes

    def find(self, keep: Keep, *, resumed: bool) -> KeptAnswer | None:
        """Returns the answer that a client asks for again; None if it is to be computed.

        An answer that is ``resumed`` here takes the place of what this node had of it before.

        Raises KeyReused for another request with the same key, and Gone if the client has events of an answer that is
        not kept here.
        """
        found = self._answers.get(keep.key)
        if found is not None and found.keep.owner != keep.owner:
            found = None
            if keep.after is None:  # somebody knows another client's key: that one keeps its answer
                raise KeyReused("this idempotency key is not this client's", code="idempotency_key_reused")
        if resumed:
            if found is not None:
                self.discard(found)
            return None
        if found is None:
            if keep.after is not None:
                raise not_kept()
            return None
        if found.keep.body != keep.body:
            raise KeyReused(
                "another request was sent with this idempotency key: a new request needs a new key",
                code="idempotency_key_reused",
            )
        if keep.after is None and found.begins_late:
            self.discard(found)
            return None
        self.replayed += 1
        return found

    def open(
        self,
        keep: Keep,
        answer: AnswerIdentity,
        label: str,
        path: str,
        produce: Callable[[KeptAnswer], Awaitable[None]],
    ) -> KeptAnswer | None:
        """Begins an answer that ``produce`` writes, in a task of its own; None if no more can be kept."""
        if len(self._answers) >= self._limits.answers and not self._evict():
            return None
        kept = KeptAnswer(keep, answer, label, path, self)
        self._answers[keep.key] = kept
        self._logs.add(kept)
        self.grew(kept, kept.size)
        kept.task = asyncio.get_running_loop().create_task(self._produce(kept, produce))
        return kept

    def grew(self, answer: KeptAnswer, size: int) -> None:
        """Counts ``size`` more bytes of ``answer``. The oldest answers that are over make room for them."""
        if answer not in self._logs:
            return
        self.taken_bytes += size
        while self.overdrawn and self._evict():
            pass

    def unread(self, answer: KeptAnswer) -> None:
        """Notes that nobody reads ``answer`` now."""
        if self._answers.get(answer.keep.key) is not answer:
            self._release(answer)
            return
        owner = answer.keep.owner
        running = sum(
            not other.over and not other.readers and other.keep.owner == owner for other in self._answers.values()
        )
        if not answer.over and (self._draining or answer.leaves or running > self._limits.answers // UNREAD_SHARE):
            self.discard(answer)
        else:
            self._keep_for_a_while(answer)

    def discard(self, answer: KeptAnswer) -> None:
        """Keeps ``answer`` no longer. It goes on only while somebody reads it."""
        if self._answers.get(answer.keep.key) is answer:
            del self._answers[answer.keep.key]
        if not answer.readers:
            self._release(answer)

    def drain(self) -> None:
        """Gives up the answers that nobody reads: this node ends, and waits for none of them."""
        self._draining = True
        for answer in tuple(self._answers.values()):
            if not answer.readers:
                self.discard(answer)

    async def _produce(self, answer: KeptAnswer, produce: Callable[[KeptAnswer], Awaitable[None]]) -> None:
        try:
            await produce(answer)
        except asyncio.CancelledError:
            answer.fail(Unavailable("this node gave the request up", code="draining", retry_after_s=1))
            raise
        except Exception as exc:
            answer.fail(exc)
        finally:
            answer.task = None
            if answer.spoilt or not answer.over:
                self.discard(answer)
            elif not answer.readers:
                self._keep_for_a_while(answer)

    def _keep_for_a_while(self, answer: KeptAnswer) -> None:
        if answer.timer is not None:
            answer.timer.cancel()
        answer.timer = asyncio.get_running_loop().call_later(self._limits.keep_s, self.discard, answer)

    def _evict(self) -> bool:
        """Drops the oldest answer that is over and unread, of the owner who has most of those, if there is one."""
        idle = [answer for answer in self._answers.values() if answer.over and not answer.readers]
        if not idle:
            return False
        sizes: Counter[bytes] = Counter()
        for answer in idle:
            sizes[answer.keep.owner] += answer.size
        most = sizes.most_common(1)[0][0]
        self.discard(next(answer for answer in idle if answer.keep.owner == most))
        return True

    def _release(self, answer: KeptAnswer) -> None:
        """Frees what ``answer`` takes, and ends its task."""
        if answer not in self._logs:
            return
        overdrawn = self.overdrawn
        self._logs.discard(answer)
        self.taken_bytes -= answer.size
        if overdrawn and not self.overdrawn:
            for other in self._logs:
                other.wake()  # its producer may have waited for this
        if answer.timer is not None:
            answer.timer.cancel()
        if answer.task is not None:
            answer.task.cancel()


class KeptAnswersMetrics(Collector):
    """Shows Prometheus the answers that a node keeps."""

    def __init__(self, kept: KeptAnswers) -> None:
        self._kept = kept

    def collect(self) -> Iterable[Metric]:
        kept = self._kept
        yield GaugeMetricFamily(
            "pdserve_kept_answers", "answers kept for clients that ask again, those under way too", len(kept)
        )
        yield GaugeMetricFamily("pdserve_kept_answers_bytes", "memory that kept answers take", kept.taken_bytes)
        yield CounterMetricFamily("pdserve_kept_answers_replayed", "requests that got a kept answer", kept.replayed)


def not_kept() -> Gone:
    """Returns the error for a client whose events cannot be found."""
    return Gone(
        "the events behind this Last-Event-ID are not kept any more: send the request without it",
        code="answer_not_kept",
    )
