"""Remembers the last minutes of one process of a proxy, for those who watch the cluster.

``Incidents`` are the last things that went wrong or changed. What strangers can cause has bounds: so many incidents are
stored, and those that are alike become one with a count. ``RecentCounts`` say how much came in each of the last steps
of time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from pdserve.wire.status import Incident, IncidentKind

MAX_INCIDENTS = 128
MAX_TEXT_CHARS = 300
ALIKE_S = 30.0
"""Incidents of one kind, with the same node and text, become one if no more than this lies between two of them."""
LOOKED_THROUGH = 16
"""The number of incidents among which one that is alike is looked for."""

STEP_S = 5
"""A step takes so many seconds. Steps have numbers: the monotonic clock divided by this."""
STEPS = 60
"""So many whole steps are remembered."""


class Incidents:
    """The last incidents of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    def add(self, kind: IncidentKind, text: str, *, node: str = "", request: str = "") -> None:
        """Notes that something happened now, to ``node`` or to ``request`` or to both."""
        now, text = self._clock(), text[:MAX_TEXT_CHARS]
        first = max(0, len(self._incidents) - LOOKED_THROUGH)
        for index in range(len(self._incidents) - 1, first - 1, -1):
            one = self._incidents[index]
            if (one.kind, one.node, one.text) == (kind, node, text) and now - one.at_s <= ALIKE_S:
                del self._incidents[index]
                self._incidents.append(msgspec.structs.replace(one, at_s=now, request=request, count=one.count + 1))
                return
        self._incidents.append(Incident(kind, now, text, node, request))

    def newest(self) -> tuple[Incident, ...]:
        """Returns the incidents, the last one at the end."""
        return tuple(self._incidents)


def last_incidents(parts: Iterable[Iterable[Incident]]) -> tuple[Incident, ...]:
    """Returns the last incidents of several processes, the last one at the end."""
    everything = sorted((one for part in parts for one in part), key=lambda one: one.at_s)
    return tuple(everything[-MAX_INCIDENTS:])


def step_of(at_s: float) -> int:
    """Returns the number of the step that ``at_s`` lies in."""
    return int(at_s // STEP_S)


class RecentCounts:
    """The sums of what came in each step, in a bounded number of steps. Steps in which nothing came are not stored."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def add(self, at_s: float, number: int = 1) -> None:
        """Adds ``number`` to the step of ``at_s``, a time that is hardly before those of earlier calls."""
        step = step_of(at_s)
        if step in self._sums:
            self._sums[step] += number
            return
        self._sums[step] = number
        # The present step and all whole ones before it.
        while len(self._sums) > STEPS + 1:
            del self._sums[min(self._sums)]

    def by_step(self) -> dict[int, int]:
        """Returns the sums by the numbers of their steps. Some may be older than what is shown."""
        return dict(self._sums)
