"""What one process remembers of its requests, and whether it exports spans of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.config import TraceConfig
from pdserve.tracing.kept_lanes import KeptLanes
from pdserve.tracing.span_counts import SpanCounts
from pdserve.wire.trace_context import TraceContext, new_trace_id, read_traceparent

NO_PARENT = bytes(8)
"""The span id of a context that begins a trace."""
FLUSH_S = 2.0
"""How long the last spans have to leave when the process ends."""


class Tracing:
    """The lanes of one process, and the contexts of the traces that begin in it."""

    def __init__(self, config: TraceConfig | None = None) -> None:
        """Without ``config`` nothing is kept, and nothing is exported."""
        self._config = config or TraceConfig(kept_lanes=0)
        self.lanes = KeptLanes(self._config.kept_lanes)

    @property
    def exports(self) -> bool:
        """Whether this process exports spans now."""
        return self.lanes.export is not None

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
        self.lanes.export = export.add
        try:
            yield
        finally:
            self.lanes.export = None
            await asyncio.to_thread(export.close, FLUSH_S)
