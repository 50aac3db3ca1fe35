"""Which trace a request belongs to, and the span that its next part hangs from.

Clients say so in the header ``traceparent``, as W3C Trace Context has it; a proxy passes it on in its ticket, and a
decode engine in its order to a prefill engine. Both are authenticated. A context says nothing about the request.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated

import msgspec

TraceId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
SpanId = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceContext(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A trace, and the span in it whose children come next."""

    trace_id: TraceId
    span_id: SpanId
    sampled: bool = True
    """Whether anybody exports this trace's spans."""

    def child(self, span_id: bytes) -> TraceContext:
        """Returns the context of what hangs from the span ``span_id`` of the same trace."""
        return TraceContext(self.trace_id, span_id, self.sampled)


def new_trace_id() -> bytes:
    return secrets.token_bytes(16)


def new_span_id() -> bytes:
    return secrets.token_bytes(8)


def read_traceparent(header: str | None) -> TraceContext | None:
    """Returns the context in a ``traceparent`` header. A header that is none, or malformed, counts as absent."""
    found = None if header is None else _TRACEPARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    # Later versions may append fields; this one has none, and ids of zeros are invalid.
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(bytes.fromhex(trace_id), bytes.fromhex(span_id), bool(int(flags, 16) & _SAMPLED))
