"""Decides which requests are admitted now, which wait, and which are turned away.

``AdmissionQueue`` takes events and ``now`` and returns the requests that it admits, without any I/O.
``AdmissionController`` lets tasks wait for their turn in it, and gives each place back however its task ends.

    enter ──▶ ADMITTED ──────────────▶ leave        there is a place
    enter ──▶ WAITING ──▶ ADMITTED                  the proxy is full: requests take turns
                 └────▶ leave                       the client left, or waited too long
    enter ──▶ RequestError                          429: its caller has too many; 503: the queue is full

Requests take turns in the order in which they came, moved by their priorities (``pdserve.wire.terms``).

The limits count answers: a request for eight prompts with ``n`` of 128 takes 1,024 places in engines' batches. One
request takes at most half of all places, so that others always get their turn beside it. The queue counts by caller,
the owner of an API key; ``HeldBodies`` counts by client, which is the address where there are no keys.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdserve.errors import TooManyRequests, Unavailable
from pdserve.wire.terms import turn_at
from pdserve_proxy.credentials import ANONYMOUS


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The limits of one process. 0 means no limit, except in ``waiting``, where it means no queue."""

    in_flight: int
    """The answers that may be under way."""
    per_caller: int
    """The answers to one caller's requests that may be under way or waiting, at all proxies of the cluster."""
    waiting: int
    """The requests that may wait."""
    wait_s: float


def share_of(limit: int, proxies: int) -> int:
    """Returns one proxy's share of ``limit``, rounded up, so that it is never 0."""
    return -(-limit // max(proxies, 1))


class AdmissionEntry(msgspec.Struct, frozen=True, eq=False):
    """One request, from ``enter`` to ``leave``."""

    caller: str
    places: int
    """The number of places that it takes when it is admitted."""
    share: int
    """The number of answers that it counts as against its caller's limit."""
    deadline_s: float
    turn: tuple[float, int]
    """Waiting requests are admitted in this order: by the time that counts for their turns, then as they came."""


class AdmissionQueue:
    """The requests of one proxy process. Times are seconds on one clock of the caller's."""

    def __init__(self, limits: AdmissionLimits, proxies: Callable[[], int] = lambda: 1) -> None:
        """``proxies`` returns how many proxies share the limit of a caller now."""
        self._limits = limits
        self._proxies = proxies
        self._admitted: set[AdmissionEntry] = set()
        self._places_taken = 0
        """The number of places that the admitted requests have."""
        self._largest = max(limits.in_flight // 2, 1)
        self._waiting: list[AdmissionEntry] = []
        """The requests that wait, in the order of their turns."""
        self._entered = 0
        self._answers_of_caller: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_admitted(self, entry: AdmissionEntry) -> bool:
        return entry in self._admitted

    def enter(self, caller: str, now: float, answers: int = 1, priority: int = 0) -> AdmissionEntry:
        """Admits a request or lets it wait, and returns its entry, which ``leave`` has to be called with.

        A request for more ``answers`` than a caller may have is admitted if the caller has no other.

        Raises TooManyRequests if ``caller`` has its share, Unavailable if the queue is full.
        """
        limits = self._limits
        of_caller = self._answers_of_caller.get(caller, 0)
        share = answers
        if limits.per_caller and caller != ANONYMOUS:
            proxies = self._proxies()
            per_caller = share_of(limits.per_caller, proxies)
            share = min(answers, per_caller)
            if of_caller + share > per_caller:
                where = "" if proxies == 1 else f" at each of {proxies} proxies"
                raise TooManyRequests(
                    f"this key may have {per_caller} answers under way{where}: it has {of_caller}, "
                    f"and this request asks for {answers}",
                    code="rate_limit_exceeded",
                    retry_after_s=1,
                )
        self._entered += 1
        turn = (turn_at(now, priority), self._entered)
        entry = AdmissionEntry(caller, min(answers, self._largest), share, now + limits.wait_s, turn)
        if self._has_room(entry) and not (self._waiting and self._waiting[0].turn < turn):
            self._admit(entry)
        elif len(self._waiting) < limits.waiting:
            insort(self._waiting, entry, key=_turn)
        else:
            raise Unavailable("the proxy has all the requests it may hold", code="queue_full", retry_after_s=1)
        self._answers_of_caller[caller] = of_caller + share
        return entry

    def leave(self, entry: AdmissionEntry) -> list[AdmissionEntry]:
        """Takes out a request that is over or waits no longer, and returns those that are admitted in its place.

        Every call but the first does nothing.
        """
        if entry in self._admitted:
            self._admitted.remove(entry)
            self._places_taken -= entry.places
        elif not self._stop_waiting(entry):
            return []
        left = self._answers_of_caller[entry.caller] - entry.share
        if left:
            self._answers_of_caller[entry.caller] = left
        else:
            del self._answers_of_caller[entry.caller]
        return self._admit_waiting() if self._waiting else []

    def _stop_waiting(self, entry: AdmissionEntry) -> bool:
        """Takes out a request that waits, and returns whether there was one."""
        at = bisect_left(self._waiting, entry.turn, key=_turn)
        waits = at < len(self._waiting) and self._waiting[at] is entry
        if waits:
            del self._waiting[at]
        return waits

    def _admit_waiting(self) -> list[AdmissionEntry]:
        admitted = []
        while self._waiting and self._has_room(self._waiting[0]):
            first = self._waiting.pop(0)
            self._admit(first)
            admitted.append(first)
        return admitted

    def _has_room(self, entry: AdmissionEntry) -> bool:
        return not self._limits.in_flight or self._places_taken + entry.places <= self._limits.in_flight

    def _admit(self, entry: AdmissionEntry) -> None:
        self._admitted.add(entry)
        self._places_taken += entry.places


def _turn(entry: AdmissionEntry) -> tuple[float, int]:
    return entry.turn


class AdmissionController:
    """Admits the requests of one proxy process, each for the task that handles it."""

    def __init__(self, limits: AdmissionLimits, proxies: Callable[[], int] = lambda: 1) -> None:
        """``proxies`` is as ``AdmissionQueue`` takes it."""
        self._queue = AdmissionQueue(limits, proxies)
        self._wait_s = limits.wait_s
        self._waiters: dict[AdmissionEntry, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their turn."""
        return self._queue.waiting

    async def admit(
        self, caller: str, answers: int, hold_place: Callable[[Callable[[], None]], None], priority: int = 0
    ) -> None:
        """Returns when a request of ``caller`` for ``answers`` may go on.

        Before it waits, it passes ``hold_place`` the function that the caller has to call when the request is over.

        Raises TooManyRequests, or Unavailable if the queue is full or the request's turn does not come in time.
        """
        entry = self._queue.enter(caller, time.monotonic(), answers, priority)  # the event loop's clock
        hold_place(lambda: self._leave(entry))
        if self._queue.is_admitted(entry):
            return
        waiter = self._waiters[entry] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(entry.deadline_s):
                await waiter
        except TimeoutError as exc:
            self._leave(entry)
            raise Unavailable(
                f"no place for this request within {self._wait_s:g} s", code="queue_timeout", retry_after_s=1
            ) from exc
        finally:
            self._waiters.pop(entry, None)

    def _leave(self, entry: AdmissionEntry) -> None:
        for admitted in self._queue.leave(entry):
            waiter = self._waiters.get(admitted)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
