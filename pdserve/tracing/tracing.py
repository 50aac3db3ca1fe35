"""What one process remembers of its requests, and whether it exports spans of them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from pdserve.config import TraceConfig
from pdserve.wire.timeline import TimelinePart, TraceContext, new_trace_id, read_traceparent

MAX_RECALLED = 64
"""The most parts with one id that are looked up: ids are the clients', and may be all alike."""


class TimelineRecord(Protocol):
    """Something of which a part of a timeline can be made."""

    @property
    def request_id(self) -> str: ...

    def part(self) -> TimelinePart:
        """Returns the part."""


class RecentParts:
    """The newest parts. Used by one thread."""

    def __init__(self, count: int) -> None:
        """Keeps ``count`` parts."""
        self._parts: deque[TimelinePart | TimelineRecord] = deque(maxlen=count)
        self.export: Callable[[TimelinePart], None] | None = None
        """Gets each part that belongs to a trace."""

        self.live: Callable[[str], Iterable[TimelinePart]] = lambda _: ()
        """Returns the parts of requests with this id that are under way."""

    @property
    def wanted(self) -> bool:
        """Whether parts are of any use: if not, nothing is to be noted."""
        return bool(self._parts.maxlen) or self.export is not None

    def add(self, part: TimelinePart) -> None:
        self._parts.append(part)
        if self.export is not None and part.trace is not None:
            self.export(part)

    def add_record(self, record: TimelineRecord, *, traced: bool) -> None:
        """Does what ``add`` does with the part of ``record``, which is made only if somebody wants it.

        ``traced`` says whether the part belongs to a trace.
        """
        if traced and self.export is not None:
            self.add(record.part())
        else:
            self._parts.append(record)

    def recall(self, request_id: str) -> tuple[TimelinePart, ...]:
        """Returns the parts of the requests with this id, the newest ``MAX_RECALLED`` of them."""
        kept = [one for one in self._parts if one.request_id == request_id]
        found = [one if isinstance(one, TimelinePart) else one.part() for one in kept[-MAX_RECALLED:]]
        found += self.live(request_id)
        return tuple(found[-MAX_RECALLED:])


class SpanCounts(Collector):
    """The counts of one process; each has one writer but at the end."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.exported = 0
        self.dropped = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{self._prefix}_traced_requests",
            "Requests whose spans were to be exported, by what became of them.",
            labels=["outcome"],
        )
        family.add_metric(["exported"], self.exported)
        family.add_metric(["dropped"], self.dropped)
        yield family


NO_PARENT = bytes(8)
"""The span id of a context that begins a trace."""
FLUSH_S = 2.0
"""How long the last spans have to leave when the process ends."""


class Tracing:
    """The parts of one process, and the contexts of the traces that begin in it."""

    def __init__(self, config: TraceConfig | None = None) -> None:
        """Without ``config`` nothing is recorded, and nothing is exported."""
        self._config = config or TraceConfig(kept_timelines=0)
        self.parts = RecentParts(self._config.kept_timelines)

    @property
    def exports(self) -> bool:
        """Whether this process exports spans now."""
        return self.parts.export is not None

    def begin(self, traceparent: str | None) -> TraceContext | None:
        """Returns the context of a request: its client's, or that of a new trace. None if nobody exports it."""
        if traceparent is not None and (given := read_traceparent(traceparent)) is not None:
            return given if given.sampled else None
        if not self.exports or random.random() >= self._config.ratio:  # noqa: S311  # no secret
            return None
        return TraceContext(new_trace_id(), NO_PARENT)

    @asynccontextmanager
    async def exporting(self, attributes: dict[str, str], counts: SpanCounts) -> AsyncIterator[None]:
        """Exports spans within the block, if there is a collector. In its end the last ones have ``FLUSH_S`` to leave.

        ``attributes`` describe the process.
        """
        if not self._config.otlp_endpoint:
            yield
            return
        # Late, because it takes time and memory that a process without spans has a better use for.
        from pdserve.tracing.span_export import SpanExport

        export = SpanExport(self._config.otlp_endpoint, attributes, counts)
        self.parts.export = export.add
        try:
            yield
        finally:
            self.parts.export = None
            await asyncio.to_thread(export.close, FLUSH_S)
