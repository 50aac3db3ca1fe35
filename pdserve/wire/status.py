"""What one process of a proxy knows of its requests, for those who watch the cluster. Nothing of a prompt is in it.

Times are seconds on the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import enum

import msgspec


class RequestStage(enum.Enum):
    """How far a request is, as the proxy can tell without reading its answer."""

    QUEUED = "queued"
    """It has no node yet: its body is on its way, or it waits for its turn."""
    PROMPT = "prompt"
    """It is at a node, which has no first token of it yet."""
    ANSWER = "answer"
    RESUMING = "resuming"
    """Its node was lost or left, and no other one has gone on with it yet."""
    ENDED = "ended"


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A time in which a client got nothing, because its answer went from one node to another."""

    from_s: float
    to_s: float


class RequestProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """How far one request is, as its proxy remembers it and as it shows it."""

    request_id: str = msgspec.field(name="id")
    path: str = msgspec.field(name="route")
    arrived_s: float
    sent_s: float | None = None
    """When its first attempt began."""
    prompt_done_s: float | None = None
    """When its node had no more need of a prefill node: at its first token, or with the complete answer."""
    first_token: bool = False
    """Whether ``prompt_done_s`` is the time of its first token."""
    pauses: tuple[Pause, ...] = ()
    attempts: int = 0
    ended_s: float | None = None
    outcome: str = ""
    status: int = 0


class RequestView(RequestProgress, frozen=True, kw_only=True):
    """One request at the proxy, under way or just ended, as those see it who watch the cluster."""

    stage: RequestStage
    decode: str = ""
    """The name of the node of its last attempt."""
    prefill: str = ""
    """The name of the prefill node that this attempt's ticket named. The decode node may have computed the prompt."""


class IncidentKind(enum.Enum):
    """What happened to a node or to a request that somebody who watches the cluster should know."""

    REQUEST_FAILED = "request_failed"
    ATTEMPT_FAILED = "attempt_failed"
    """A node failed with a request, which may have gone on elsewhere."""
    RESUMED = "resumed"
    MOVED = "moved"
    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    NODE_DRAINS = "node_drains"
    ROLE_CHANGED = "role_changed"
    CORES_SHARED = "cores_shared"
    """The node has too few cores because others compute on them, too."""
    PROXIES_CHANGED = "proxies_changed"
    """Another proxy came, or is gone."""
    COMMANDED = "commanded"


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that happened, or several alike in a row."""

    kind: IncidentKind
    at_s: float
    """When it happened last."""
    text: str
    node: str = ""
    request: str = ""
    """The id of the last request that it happened to."""
    count: int = 1


class RelayStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requests of one process of a proxy."""

    stages: dict[RequestStage, int]
    """How many requests there are at each stage, however many of them are listed."""
    under_way: tuple[RequestView, ...]
    """Those that came first."""
    ended: tuple[RequestView, ...]
    """Those that ended last, the last one at the end."""
    outcomes: dict[str, int]
    """How many requests have ended since the process started, by outcome."""
    incidents: tuple[Incident, ...]
    ended_by_step: dict[int, int] = {}
    """How many requests have ended in each of the last steps of time, by the step's number on the monotonic clock."""
