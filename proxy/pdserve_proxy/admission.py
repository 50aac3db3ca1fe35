"""Who may go in now, who waits, who is turned away. Sans-IO: takes events and ``now``, says who goes in.

ask ──▶ IN ──────────────▶ leave        room
ask ──▶ WAITING ──▶ IN                  full; first come, first in
             └────▶ leave, or expire    the client left, or waited too long
ask ──▶ RequestError                    429: its caller has too many; 503: the queue is full
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
    per_caller: int
    """Of one caller's requests, under way and waiting."""
    waiting: int
    wait_s: float


class Visit(msgspec.Struct, frozen=True, eq=False):
    """One request, from ``ask`` to ``leave``."""

    caller: str
    deadline_s: float


class Admission:
    """The requests of one proxy process. Times are seconds on one clock of the caller's."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._inside: set[Visit] = set()
        self._waiting: OrderedDict[Visit, None] = OrderedDict()
        self._of_caller: dict[str, int] = {}

    @property
    def inside(self) -> int:
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_inside(self, visit: Visit) -> bool:
        return visit in self._inside

    def ask(self, caller: str, now: float) -> Visit:
        """A visit that is inside, or waits. ``leave`` has to be called with it.

        Raises TooManyRequests if ``caller`` has its share, Unavailable if the queue is full.
        """
        limits = self._limits
        of_caller = self._of_caller.get(caller, 0)
        if limits.per_caller and caller != ANONYMOUS and of_caller >= limits.per_caller:
            raise TooManyRequests(
                f"this key has {limits.per_caller} requests under way, as many as it may",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        visit = Visit(caller, now + limits.wait_s)
        if not limits.in_flight or len(self._inside) < limits.in_flight:
            self._inside.add(visit)
        elif len(self._waiting) < limits.waiting:
            self._waiting[visit] = None
        else:
            raise Unavailable("the proxy has all the requests it may hold", code="queue_full", retry_after_s=1)
        self._of_caller[caller] = of_caller + 1
        return visit

    def leave(self, visit: Visit) -> Visit | None:
        """The request is over, or does not want to wait any longer. Returns the one that goes in for it, if one does.

        Every call but the first does nothing.
        """
        if visit in self._waiting:
            del self._waiting[visit]
            self._forget(visit)
            return None
        if visit not in self._inside:
            return None
        self._inside.remove(visit)
        self._forget(visit)
        if not self._waiting:
            return None
        first, _ = self._waiting.popitem(last=False)
        self._inside.add(first)
        return first

    def _forget(self, visit: Visit) -> None:
        self._of_caller[visit.caller] -= 1
        if not self._of_caller[visit.caller]:
            del self._of_caller[visit.caller]
