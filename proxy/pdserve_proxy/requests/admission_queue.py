"""Decides which requests are admitted now, which wait, and which are turned away.

``AdmissionQueue`` takes events and ``now`` and returns who is admitted, free of I/O; ``AdmissionController`` lets tasks
wait for their turn in it, and gives a place back whatever becomes of its task.

    enter ──▶ IN ──────────────▶ leave        there is room
    enter ──▶ WAITING ──▶ IN                  the proxy is full: first come, first in
                 └────▶ leave, or expire    the client left, or waited too long
    enter ──▶ RequestError                    429: its caller has too many; 503: the queue is full

What is counted is answers: a request for eight prompts with ``n`` of 128 takes 1,024 places in engines' batches. One
request counts as at most half of all that may be inside, so that others always get their turn beside it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdserve.errors import TooManyRequests, Unavailable
from pdserve_proxy.credentials import ANONYMOUS


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """0 stands for no limit, except for ``waiting``: no queue."""

    in_flight: int
    """Answers."""
    per_caller: int
    """Answers to one caller's requests, under way and waiting."""
    waiting: int
    """Requests."""
    wait_s: float


class AdmissionEntry(msgspec.Struct, frozen=True, eq=False):
    """One request, from ``enter`` to ``leave``."""

    caller: str
    places: int
    """Of those inside."""
    share: int
    """Of its caller's."""
    deadline_s: float


class AdmissionQueue:
    """The requests of one proxy process. Times are seconds on one clock of the caller's."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._inside: set[AdmissionEntry] = set()
        self._taken = 0
        """Places, by those inside."""
        self._largest = max(limits.in_flight // 2, 1)
        self._waiting: OrderedDict[AdmissionEntry, None] = OrderedDict()
        self._of_caller: dict[str, int] = {}

    @property
    def inside(self) -> int:
        return len(self._inside)

    @property
    def taken(self) -> int:
        """The places that those inside have."""
        return self._taken

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_admitted(self, entry: AdmissionEntry) -> bool:
        return entry in self._inside

    def enter(self, caller: str, now: float, answers: int = 1) -> AdmissionEntry:
        """A entry that is inside, or waits. ``leave`` has to be called with it.

        Raises TooManyRequests if ``caller`` has its share, Unavailable if the queue is full. A request for more
        ``answers`` than a caller may have goes in if that has nothing else.
        """
        limits = self._limits
        of_caller = self._of_caller.get(caller, 0)
        share = answers
        if limits.per_caller and caller != ANONYMOUS:
            share = min(answers, limits.per_caller)
            if of_caller + share > limits.per_caller:
                raise TooManyRequests(
                    f"this key may have {limits.per_caller} answers under way: it has {of_caller}, "
                    f"and this request asks for {answers}",
                    code="rate_limit_exceeded",
                    retry_after_s=1,
                )
        entry = AdmissionEntry(caller, min(answers, self._largest), share, now + limits.wait_s)
        if not self._waiting and self._has_room(entry):
            self._admit(entry)
        elif len(self._waiting) < limits.waiting:
            self._waiting[entry] = None
        else:
            raise Unavailable("the proxy has all the requests it may hold", code="queue_full", retry_after_s=1)
        self._of_caller[caller] = of_caller + share
        return entry

    def leave(self, entry: AdmissionEntry) -> list[AdmissionEntry]:
        """The request is over, or does not want to wait any longer. Returns those that go in for it.

        Every call but the first does nothing.
        """
        if entry in self._waiting:
            del self._waiting[entry]
        elif entry in self._inside:
            self._inside.remove(entry)
            self._taken -= entry.places
        else:
            return []
        self._of_caller[entry.caller] -= entry.share
        if not self._of_caller[entry.caller]:
            del self._of_caller[entry.caller]
        return self._admit_waiting()

    def _admit_waiting(self) -> list[AdmissionEntry]:
        following = []
        while self._waiting and self._has_room(first := next(iter(self._waiting))):
            del self._waiting[first]
            self._admit(first)
            following.append(first)
        return following

    def _has_room(self, entry: AdmissionEntry) -> bool:
        return not self._limits.in_flight or self._taken + entry.places <= self._limits.in_flight

    def _admit(self, entry: AdmissionEntry) -> None:
        self._inside.add(entry)
        self._taken += entry.places


class AdmissionController:
    def __init__(self, limits: AdmissionLimits) -> None:
        self._queue = AdmissionQueue(limits)
        self._wait_s = limits.wait_s
        self._turns: dict[AdmissionEntry, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return self._queue.waiting

    async def admit(self, caller: str, answers: int, hold: Callable[[Callable[[], None]], None]) -> None:
        """Returns when a request of ``caller`` for so many ``answers`` may go on.

        ``hold`` is given, before anything is waited for, the function that has to be called when the request is over.
        Raises TooManyRequests, or Unavailable if the queue is full or its turn does not come in time.
        """
        entry = self._queue.enter(caller, time.monotonic(), answers)  # the event loop's clock
        hold(lambda: self._leave(entry))
        if self._queue.is_admitted(entry):
            return
        turn = self._turns[entry] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(entry.deadline_s):
                await turn
        except TimeoutError as exc:
            self._leave(entry)
            raise Unavailable(
                f"no room for this request within {self._wait_s:g} s", code="queue_timeout", retry_after_s=1
            ) from exc
        finally:
            self._turns.pop(entry, None)

    def _leave(self, entry: AdmissionEntry) -> None:
        for following in self._queue.leave(entry):
            turn = self._turns.get(following)
            if turn is not None and not turn.done():
                turn.set_result(None)
