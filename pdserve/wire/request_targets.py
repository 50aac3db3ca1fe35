"""The latencies that a client asks for with its request, in place of those that the node aims at."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

MAX_TTFT_MS = 600_000
MAX_ITL_MS = 60_000

TtftMs: TypeAlias = Annotated[float, Meta(ge=1, le=MAX_TTFT_MS)]
"""The first token should come so many milliseconds after the request, at most."""
ItlMs: TypeAlias = Annotated[float, Meta(ge=1, le=MAX_ITL_MS)]
"""Each later token should come so many milliseconds after the one before it, at most."""


class RequestTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's own targets. None leaves that target to the node."""

    ttft_ms: TtftMs | None = None
    itl_ms: ItlMs | None = None


NO_OWN_TARGETS = RequestTargets()
