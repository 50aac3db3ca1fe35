"""Who may go in now, who waits, who is turned away. Sans-IO: takes events and ``now``, says who goes in.

ask ──▶ IN ──────────────▶ leave        room
ask ──▶ WAITING ──▶ IN                  full; first come, first in
             └────▶ leave, or expire    the client left, or waited too long
ask ──▶ RequestError                    429: its caller has too many; 503: the queue is full

What is counted is answers: a request for eight prompts with ``n`` of 128 takes 1,024 places in engines' batches. One
request counts as at most half of all that may be inside, so that others always get their turn beside it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from pdserve.errors import TooManyRequests, Unavailable

ANONYMOUS = ""
"""The caller where no keys are asked for: no limit of its own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """0 stands for no limit, except for ``waiting``: no queue."""

    in_flight: int
    """Answers."""
    per_caller: int
    """Answers to one caller's requests, under way and waiting."""
    waiting: int
    """Requests."""
    wait_s: float


class Visit(msgspec.Struct, frozen=True, eq=False):
    """One request, from ``ask`` to ``leave``."""

    caller: str
    places: int
    """Of those inside."""
    share: int
    """Of its caller's."""
    deadline_s: float


class Admission:
    """The requests of one proxy process. Times are seconds on one clock of the caller's."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._inside: set[Visit] = set()
        self._taken = 0
        """Places, by those inside."""
        self._largest = max(limits.in_flight // 2, 1)
        self._waiting: OrderedDict[Visit, None] = OrderedDict()
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

    def is_inside(self, visit: Visit) -> bool:
        return visit in self._inside

    def ask(self, caller: str, now: float, answers: int = 1) -> Visit:
        """A visit that is inside, or waits. ``leave`` has to be called with it.

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
        visit = Visit(caller, min(answers, self._largest), share, now + limits.wait_s)
        if not self._waiting and self._has_room(visit):
            self._go_in(visit)
        elif len(self._waiting) < limits.waiting:
            self._waiting[visit] = None
        else:
            raise Unavailable("the proxy has all the requests it may hold", code="queue_full", retry_after_s=1)
        self._of_caller[caller] = of_caller + share
        return visit

    def leave(self, visit: Visit) -> list[Visit]:
        """The request is over, or does not want to wait any longer. Returns those that go in for it.

        Every call but the first does nothing.
        """
        if visit in self._waiting:
            del self._waiting[visit]
        elif visit in self._inside:
            self._inside.remove(visit)
            self._taken -= visit.places
        else:
            return []
        self._of_caller[visit.caller] -= visit.share
        if not self._of_caller[visit.caller]:
            del self._of_caller[visit.caller]
        return self._let_in()

    def _let_in(self) -> list[Visit]:
        following = []
        while self._waiting and self._has_room(first := next(iter(self._waiting))):
            del self._waiting[first]
            self._go_in(first)
            following.append(first)
        return following

    def _has_room(self, visit: Visit) -> bool:
        return not self._limits.in_flight or self._taken + visit.places <= self._limits.in_flight

    def _go_in(self, visit: Visit) -> None:
        self._inside.add(visit)
        self._taken += visit.places
