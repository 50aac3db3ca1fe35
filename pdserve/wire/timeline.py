"""What each process remembers of a request that it took part in: the phases, moments and gaps of its timeline.

An engine sends the parts of ended requests to its API process (``engine.Recorded``). An API process and a proxy keep
the newest ones. A node gives its parts to whoever signs the command ``Recall`` with the cluster secret. A proxy puts
the parts of all processes together, as JSON (``Timeline``).

Times are seconds. In a part they are of the monotonic clock of its machine; in a ``Timeline``, from its beginning.
Nothing here says what a prompt or an answer contains.

A request may belong to a trace (``TraceContext``). Clients say so in the header ``traceparent``, as W3C Trace Context
has it; a proxy passes it on in its ticket, and a decode engine in its order to a prefill engine.
"""

from __future__ import annotations

import enum
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


class ProcessKind(enum.Enum):
    PROXY = "proxy"
    API = "api"
    """A node's API process."""
    ENGINE = "engine"
    """A node's engine process, which computes or fetches a prompt, and decodes."""
    PREFILL_ENGINE = "prefill_engine"
    """The engine process of a node that computes the prompt for another node."""


class PhaseKind(enum.Enum):
    # Enum's own function hashes the name, in Python. Each request looks kinds up ten times.
    __hash__ = object.__hash__

    QUEUE = "queue"
    """The request waits: at a proxy for its admission, in an engine for a place in the batch."""
    ATTEMPT = "attempt"
    """A decode node has the request, as the proxy sees it."""
    READ = "read"
    """The API process reads the body and makes tokens of it."""
    FETCH = "fetch"
    """A prefill node has the prompt's order, until the last block has landed."""
    REUSE = "reuse"
    """Another node gives blocks that it has, until the last one has landed."""
    PREFILL = "prefill"
    """This engine computes the prompt, up to the first token."""
    CHUNK = "chunk"
    """One step that computes a part of the prompt. After ``MAX_PHASES`` phases, the last chunk stands for several."""
    PUSH = "push"
    """Blocks leave for the decode node: from the first one to its word that all have landed."""
    DECODE = "decode"
    """The answer's tokens after the first."""


class MomentKind(enum.Enum):
    FIRST_BYTE = "first_byte"
    """The first byte for the client came from a node."""
    FIRST_TOKEN = "first_token"  # noqa: S105  # no password
    HANDSHAKE = "handshake"
    """The prefill engine was met for the first time, and the fetch waited for that."""
    PUSHED = "pushed"
    """The engine gave blocks to the transfer."""
    PREEMPTED = "preempted"
    LOST = "lost"
    """The request's node was lost."""
    RESUMED = "resumed"
    """Another node goes on with the answer of a node that was lost."""
    MOVED = "moved"
    """Another node goes on with the answer by plan."""


class Phase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that one process did for a request, from one time to another."""

    kind: PhaseKind
    start_s: float
    end_s: float
    node: str = ""
    """The other node that took part."""
    prefill: str = ""
    """The prefill node that an attempt's ticket named first."""
    outcome: str = ""
    tokens: int = 0
    """The tokens that the phase computed, fetched or generated."""
    chunks: int = 0
    """The steps that this chunk stands for, if those are several."""
    blocks: int = 0
    moved_bytes: int = 0
    tail_s: float | None = None
    """How much of a fetch came after the first token."""
    span_id: bytes = b""


class Moment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: MomentKind
    at_s: float
    node: str = ""
    blocks: int = 0
    gap_s: float | None = None
    """How long the client got nothing, before the answer went on."""


class Gap(msgspec.Struct, frozen=True):
    """A pause between two tokens, as the API process saw it."""

    start_s: float
    seconds: float


class Gaps(msgspec.Struct, frozen=True):
    """The pauses between the tokens of an answer."""

    counts: tuple[int, ...]
    """Entry 0 counts the gaps below 1 ms, and entry i those from 2^(i-1) to 2^i ms. The last one has no upper bound."""
    longest: tuple[Gap, ...]
    """The longest ones, in the order of time."""


class TimelinePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one process did for one request. A client request has one part at its proxy, and more at each node."""

    request_id: str
    process: ProcessKind
    start_s: float
    end_s: float | None = None
    """The end; None while the request is under way."""
    node: str = ""
    """The name of the node; empty for a proxy."""
    model: str = ""
    route: str = ""
    status: int = 0
    """The HTTP status that the proxy gave its client."""
    outcome: str = ""
    attempt: int = 0
    """The number of the proxy's attempt that this node served, from 0."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafts: int = 0
    """The guesses of its tokens that steps have checked."""
    accepted_drafts: int = 0
    phases: tuple[Phase, ...] = ()
    """The phases by their beginning."""
    moments: tuple[Moment, ...] = ()
    gaps: Gaps | None = None
    left_out: int = 0
    """The phases and moments beyond the bounds."""
    clock_error_s: float = 0.0
    """In a ``Timeline``: all times of this part may be earlier or later by so much."""
    trace: TraceContext | None = None
    """The span that this part hangs from; None if nobody exports it."""
    span_id: bytes = b""


class RecalledParts(msgspec.Struct, frozen=True):
    """What a node knows of the requests with one id: the answer to ``Recall``, as JSON."""

    now_s: float
    """The node's monotonic clock as it answered."""
    taken_s: float
    """How long the node took for the answer."""
    parts: tuple[TimelinePart, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one request, as JSON."""

    request_id: str
    began: float
    """When the request came, in seconds since 1970 by the proxy's clock."""
    duration_s: float
    """The time to its end, or until now."""
    finished: bool
    parts: tuple[TimelinePart, ...]
    """The proxy's part comes first, and then the others by their beginning."""
    silent: tuple[str, ...] = ()
    """The nodes that did not answer: their parts are missing."""
