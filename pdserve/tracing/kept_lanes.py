"""Keeps the newest lanes of a process, and hands each to the export of spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from pdserve.wire.timeline import RequestLane

MAX_RECALLED = 64
"""The most lanes with one id that are looked up: ids are the clients', and may be all alike."""


class LaneRecord(Protocol):
    """Something of which a lane can be made."""

    @property
    def request_id(self) -> str: ...

    def lane(self) -> RequestLane:
        """Returns the lane."""


class KeptLanes:
    """The newest lanes. Used by one thread."""

    def __init__(self, count: int) -> None:
        """Keeps ``count`` lanes."""
        self._lanes: deque[RequestLane | LaneRecord] = deque(maxlen=count)
        self.export: Callable[[RequestLane], None] | None = None
        """Gets each lane that belongs to a trace."""

        self.live: Callable[[str], Iterable[RequestLane]] = lambda _: ()
        """Returns the lanes of requests with this id that are under way."""

    @property
    def wanted(self) -> bool:
        """Whether lanes are of any use: if not, nothing is to be noted."""
        return bool(self._lanes.maxlen) or self.export is not None

    def add(self, lane: RequestLane) -> None:
        self._lanes.append(lane)
        if self.export is not None and lane.trace is not None:
            self.export(lane)

    def add_record(self, record: LaneRecord, *, traced: bool) -> None:
        """Does what ``add`` does with the lane of ``record``, which is made only if somebody wants it.

        ``traced`` says whether the lane belongs to a trace.
        """
        if traced and self.export is not None:
            self.add(record.lane())
        else:
            self._lanes.append(record)

    def recall(self, request_id: str) -> tuple[RequestLane, ...]:
        """Returns the lanes of the requests with this id, the newest ``MAX_RECALLED`` of them."""
        kept = [one for one in self._lanes if one.request_id == request_id]
        found = [one if isinstance(one, RequestLane) else one.lane() for one in kept[-MAX_RECALLED:]]
        found += self.live(request_id)
        return tuple(found[-MAX_RECALLED:])
