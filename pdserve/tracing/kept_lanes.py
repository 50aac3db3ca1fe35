"""Keeps the newest lanes of a process, and hands each to the export of spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from pdserve.wire.timeline import RequestLane

MAX_RECALLED = 64
"""The most lanes with one id that are looked up: ids are the clients', and may be all alike."""


class KeptLanes:
    """The newest lanes. Used by one thread."""

    def __init__(self, count: int) -> None:
        """Keeps ``count`` lanes."""
        self._lanes: deque[tuple[str, Callable[[], RequestLane]]] = deque(maxlen=count)
        """The request ids of the lanes, and what makes or returns them."""
        self.export: Callable[[RequestLane], None] | None = None
        """Gets each lane that belongs to a trace."""

        self.live: Callable[[str], Iterable[RequestLane]] = lambda _: ()
        """Returns the lanes of requests with this id that are under way."""

    @property
    def wanted(self) -> bool:
        """Whether lanes are of any use: if not, nothing is to be noted."""
        return bool(self._lanes.maxlen) or self.export is not None

    def add(self, lane: RequestLane) -> None:
        self._lanes.append((lane.request_id, partial(_same, lane)))
        if self.export is not None and lane.trace is not None:
            self.export(lane)

    def add_unmade(self, request_id: str, make: Callable[[], RequestLane], *, traced: bool) -> None:
        """Does what ``add`` does with the lane that ``make`` returns, which is made only if somebody wants it.

        ``traced`` says whether the lane belongs to a trace.
        """
        if traced and self.export is not None:
            self.add(make())
        else:
            self._lanes.append((request_id, make))

    def recall(self, request_id: str) -> tuple[RequestLane, ...]:
        """Returns the lanes of the requests with this id, the newest ``MAX_RECALLED`` of them."""
        makers = [make for kept_id, make in self._lanes if kept_id == request_id]
        found = [make() for make in makers[-MAX_RECALLED:]]
        found += self.live(request_id)
        return tuple(found[-MAX_RECALLED:])


def _same(lane: RequestLane) -> RequestLane:
    return lane
