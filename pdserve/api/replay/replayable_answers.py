"""Stores answers for clients that may ask again: the answer is written to a log, and each client reads the log.

    find ──▶ none ──▶ open ──▶ follow …             a new request: its answer is computed in a task of its own
    find ──▶ an answer ──▶ follow …                 the client asks again: it gets what it lacks, and then goes on live
             follow ──▶ its client, or the client's proxy, is gone ──▶ the answer is computed on, for ``keep_s``
             follow ──▶ the answer is over ──▶ it is stored for ``keep_s``

Only requests that say so have such a log (``pdserve.wire.replay``): any other ends with its client, at once.

What strangers can cause is bounded: the number of answers, their memory, and the time and the places in the engine's
batch of those that are computed for nobody. An old answer that is over is dropped for a new one, first among those of
the owner who has most. An answer that has to leave this node is not computed on: the proxy that takes it elsewhere
closes its connection, too.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.api.replay.answer_log import ReplayableAnswer, events_gone
from pdserve.errors import KeyReused, Unavailable
from pdserve.patience import PatientTimer
from pdserve.wire.terms import AnswerIdentity, Keep

SHARE = 8
"""One answer may take this part of the memory."""
UNREAD_SHARE = 4
"""One client's part of the engine's places, for answers that are computed while nobody reads them. All clients together
may have twice as much: beyond that, the client who has most gives up its oldest one.
"""


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """The bounds of what a node stores."""

    answers: int
    memory_bytes: int
    keep_s: float
    unread_places: int = 1
    """The places of one client's answers that are computed while nobody reads them; all clients together have twice as
    many. Both bounds are at least one.
    """


class AnswerUse(enum.Enum):
    """Who has a use for an answer now."""

    READ = "read"
    """Somebody reads it, or is about to."""
    COMPUTED = "computed"
    """Nobody reads it, and it is not over."""
    IDLE = "idle"
    """Nobody reads it, and it is over: it is dropped for others."""
    GONE = "gone"


class _Tally:
    """What some answers count for, together and by client."""

    def __init__(self) -> None:
        self.all = 0
        self.of: Counter[bytes] = Counter()
        """The sums, by client."""
        self._counts: defaultdict[bytes, dict[ReplayableAnswer, int]] = defaultdict(dict)
        """The answers by client, in the order in which they came."""

    def add(self, client: bytes, answer: ReplayableAnswer, count: int) -> None:
        self._counts[client][answer] = count
        self.of[client] += count
        self.all += count

    def remove(self, client: bytes, answer: ReplayableAnswer) -> None:
        count = self._counts[client].pop(answer)
        self.of[client] -= count
        self.all -= count
        if not self._counts[client]:
            del self._counts[client], self.of[client]

    def oldest_of_largest(self) -> ReplayableAnswer | None:
        """Returns the oldest answer of the client whose answers count for most; None if there is none."""
        if not self._counts:
            return None
        return next(iter(self._counts[max(self._counts, key=self.of.__getitem__)]))


class _Ledger:
    """Counts the answers that nobody reads, so that nothing has to look at all of them."""

    def __init__(self) -> None:
        self._uses: dict[ReplayableAnswer, AnswerUse] = {}
        self.computed = _Tally()
        """The places of the answers that are computed and not read."""
        self.idle = _Tally()
        """The sizes of the idle answers. Here, a client is the owner."""

    def move(self, answer: ReplayableAnswer, to: AnswerUse) -> None:
        was = self._uses.pop(answer, None)
        if was is AnswerUse.COMPUTED:
            self.computed.remove(answer.client, answer)
        elif was is AnswerUse.IDLE:
            self.idle.remove(answer.keep.owner, answer)
        if to is not AnswerUse.GONE:
            self._uses[answer] = to
        if to is AnswerUse.COMPUTED:
            self.computed.add(answer.client, answer, answer.places)
        elif to is AnswerUse.IDLE:
            self.idle.add(answer.keep.owner, answer, answer.size)


class ReplayableAnswers:
    """The answers that one node stores."""

    def __init__(self, limits: ReplayLimits) -> None:
        self._limits = limits
        self.share_bytes = limits.memory_bytes // SHARE
        """The memory that one answer may take."""
        self.taken_bytes = 0
        self.replayed = 0
        """How many times a client has asked again and got the answer."""
        self._answers: dict[bytes, ReplayableAnswer] = {}
        """The answers by their keys."""
        self._logs: set[ReplayableAnswer] = set()
        """Those, and the ones that are read although they are not stored any more."""
        self._ledger = _Ledger()
        self._draining = False

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def overdrawn(self) -> bool:
        """Whether answers take more memory than they may."""
        return self.taken_bytes > self._limits.memory_bytes

    def find(self, keep: Keep, *, resumed: bool) -> ReplayableAnswer | None:
        """Returns the answer that a client asks for again; None if it is to be computed.

        An answer that is ``resumed`` here takes the place of what this node had of it before.

        Raises KeyReused for another request with the same key, and Gone if the client has events of an answer that is
        not stored here.
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
                raise events_gone()
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
        client: bytes,
        produce: Callable[[ReplayableAnswer], Awaitable[None]],
    ) -> ReplayableAnswer | None:
        """Begins an answer that ``produce`` writes, in a task of its own; None if no more can be stored.

        ``client`` stands for the one for whom it is computed.
        """
        if len(self._answers) >= self._limits.answers and not self._evict():
            return None
        opened = ReplayableAnswer(keep, answer, label, path, client, self)
        self._answers[keep.key] = opened
        self._logs.add(opened)
        self._ledger.move(opened, AnswerUse.READ)
        self.grew(opened, opened.size)
        opened.task = asyncio.get_running_loop().create_task(self._produce(opened, produce))
        return opened

    def grew(self, answer: ReplayableAnswer, size: int) -> None:
        """Counts ``size`` more bytes of ``answer``. The oldest answers that are over are dropped for them."""
        if answer not in self._logs:
            return
        self._count(size)
        while self.overdrawn and self._evict():
            pass

    def read(self, answer: ReplayableAnswer) -> None:
        """Notes that somebody reads ``answer``."""
        if answer.timer is not None:
            answer.timer.cancel()
            answer.timer = None
        if answer in self._logs:
            self._ledger.move(answer, AnswerUse.READ)

    def left(self, answer: ReplayableAnswer) -> None:
        """Notes that nobody reads ``answer`` now. It is stored for a while, and computed on if that is not too much."""
        if self._answers.get(answer.keep.key) is not answer:
            self._release(answer)
        elif answer.over:
            self._store_for_a_while(answer, AnswerUse.IDLE)
        elif self._draining or answer.leaves:
            self.discard(answer)
        else:
            self._store_for_a_while(answer, AnswerUse.COMPUTED)
            each, computed = self._limits.unread_places, self._ledger.computed
            if computed.of[answer.client] > max(each, 1):
                self.discard(answer)
            while computed.all > max(2 * each, 1) and (oldest := computed.oldest_of_largest()):
                self.discard(oldest)

    def discard(self, answer: ReplayableAnswer) -> None:
        """Stores ``answer`` no longer. It goes on only while somebody reads it."""
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

    async def _produce(self, answer: ReplayableAnswer, produce: Callable[[ReplayableAnswer], Awaitable[None]]) -> None:
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
                self.left(answer)

    def _store_for_a_while(self, answer: ReplayableAnswer, use: AnswerUse) -> None:
        if answer.timer is not None:
            answer.timer.cancel()
        answer.timer = PatientTimer(asyncio.get_running_loop(), self._limits.keep_s, lambda: self.discard(answer))
        self._ledger.move(answer, use)

    def _evict(self) -> bool:
        """Drops the oldest answer that is over and unread, of the owner who has most of those, if there is one."""
        oldest = self._ledger.idle.oldest_of_largest()
        if oldest is None:
            return False
        self.discard(oldest)
        return True

    def _release(self, answer: ReplayableAnswer) -> None:
        """Frees what ``answer`` takes, and ends its task."""
        if answer not in self._logs:
            return
        self._logs.discard(answer)
        self._ledger.move(answer, AnswerUse.GONE)
        self._count(-answer.size)
        if answer.timer is not None:
            answer.timer.cancel()
        if answer.task is not None:
            answer.task.cancel()

    def _count(self, size: int) -> None:
        overdrawn = self.overdrawn
        self.taken_bytes += size
        if overdrawn and not self.overdrawn:
            for other in self._logs:
                other.wake()  # its producer may have waited for this


class ReplayMetrics(Collector):
    """Shows Prometheus the answers that a node stores."""

    def __init__(self, answers: ReplayableAnswers) -> None:
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        answers = self._answers
        yield GaugeMetricFamily(
            "pdserve_replayable_answers", "answers kept for clients that ask again, those under way too", len(answers)
        )
        yield GaugeMetricFamily(
            "pdserve_replayable_answers_bytes", "memory that kept answers take", answers.taken_bytes
        )
        yield CounterMetricFamily("pdserve_replayed_answers", "requests that got a kept answer", answers.replayed)
