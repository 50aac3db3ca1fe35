"""Keeps the last things that went wrong or changed in the cluster, for those who watch it.

What strangers can cause has bounds: so many incidents are kept, and those that are alike become one with a count.
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


class Incidents:
    """The last incidents of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    def add(self, kind: IncidentKind, text: str, *, node: str = "", request: str = "") -> None:
        """Notes that something happened now, to ``node`` or to ``request`` or to both."""
        now, text = self._clock(), text[:MAX_TEXT_CHARS]
        first = max(0, len(self._kept) - LOOKED_THROUGH)
        for index in range(len(self._kept) - 1, first - 1, -1):
            one = self._kept[index]
            if (one.kind, one.node, one.text) == (kind, node, text) and now - one.at_s <= ALIKE_S:
                del self._kept[index]
                self._kept.append(msgspec.structs.replace(one, at_s=now, request=request, count=one.count + 1))
                return
        self._kept.append(Incident(kind, now, text, node, request))

    def kept(self) -> tuple[Incident, ...]:
        """Returns the incidents, the last one at the end."""
        return tuple(self._kept)


def last_incidents(parts: Iterable[Iterable[Incident]]) -> tuple[Incident, ...]:
    """Returns the last incidents of several processes, the last one at the end."""
    everything = sorted((one for part in parts for one in part), key=lambda one: one.at_s)
    return tuple(everything[-MAX_INCIDENTS:])
