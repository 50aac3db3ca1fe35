"""Keeps the newest lanes of a process, and hands each to the export of spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from pdserve.wire.timeline import RequestLane

MAX_RECALLED = 64
"""The most lanes with one id that are looked up: ids are the clients', and may be all alike."""


class KeptLanes:
    """The newest lanes. Used by one thread."""

    def __init__(self, count: int, export: Callable[[RequestLane], None] | None = None) -> None:
        """Keeps ``count`` lanes, and gives each that belongs to a trace to ``export``."""
        self._lanes: deque[RequestLane] = deque(maxlen=count)
        self._export = export
        self.wanted = bool(count) or export is not None
        """Whether lanes are of any use: if not, nothing is to be noted."""

        self.live: Callable[[str], Iterable[RequestLane]] = lambda _: ()
        """Returns the lanes of requests with this id that are under way."""

    def add(self, lane: RequestLane) -> None:
        self._lanes.append(lane)
        if self._export is not None and lane.trace is not None:
            self._export(lane)

    def recall(self, request_id: str) -> tuple[RequestLane, ...]:
        """Returns the lanes of the requests with this id, the newest ``MAX_RECALLED`` of them."""
        found = [lane for lane in self._lanes if lane.request_id == request_id]
        found += self.live(request_id)
        return tuple(found[-MAX_RECALLED:])
