"""What one process remembers of its requests, and whether it exports spans of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from pdserve.tracing.kept_lanes import KeptLanes
from pdserve.wire.timeline import RequestLane
from pdserve.wire.trace_context import TraceContext, new_trace_id, read_traceparent

NO_PARENT = bytes(8)
"""The span id of a context that begins a trace."""


class Tracing:
    """The lanes of one process, and the contexts of the traces that begin in it."""

    def __init__(self, kept: int = 0, ratio: float = 1.0, export: Callable[[RequestLane], None] | None = None) -> None:
        """Keeps so many lanes. With ``export``, ``ratio`` is the share of requests that begin a trace here."""
        self.lanes = KeptLanes(kept, export)
        self.exports = export is not None
        self._ratio = ratio

    def begin(self, traceparent: str | None) -> TraceContext | None:
        """Returns the context of a request: its client's, or that of a new trace. None if nobody exports it."""
        if traceparent is not None and (given := read_traceparent(traceparent)) is not None:
            return given if given.sampled else None
        if not self.exports or random.random() >= self._ratio:  # noqa: S311  # no secret
            return None
        return TraceContext(new_trace_id(), NO_PARENT)
