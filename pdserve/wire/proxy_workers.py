"""A proxy's supervisor ↔ its workers, over a ZMQ ROUTER in a folder only the user can enter, without signatures.

A worker sends ``WorkerHello``, and gets ``Nodes`` then and ``NodesChanged`` at every change. When it takes connections,
it sends ``WorkerReady``. A worker answers each ``WorkerPing``, unless its event loop hangs: with ``Counts`` if requests
have ended since it last sent them in answer to one, and else with ``WorkerPong``. A worker that is asked for
``/metrics`` sends ``Scrape``; the supervisor sends ``Collect`` to every worker, adds up the ``Counts`` that come back,
and answers ``Scraped``. For ``/status`` it is the same: ``AskStatus``, ``CollectStatus``, ``StatusPart`` and
``StatusReply``. So it is for a request's timeline: ``AskTimeline``, ``CollectTimeline``, ``CollectedParts`` and
``TimelineReply``. When the supervisor has read its files again, it sends ``Renewed``. A worker with one of whose
requests two nodes were lost sends ``Suspected``, which the supervisor passes on to the others, and to each that greets
it later.

With ``--store``, the supervisor has the responses that clients may ask for again. A worker sends ``BeginResponse``
before it relays a request, and ``FinishResponse`` or ``AbandonResponse`` after it; for a client it sends
``ReadResponse`` and ``DeleteResponse``. Each but ``AbandonResponse`` is answered by ``StoreReply`` with its number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from pdserve.http.tls import Certificate
from pdserve.wire.discovery import NodeInfo, NodeLoad
from pdserve.wire.ids import BootId, RequestId
from pdserve.wire.status import RelayStatus
from pdserve.wire.timeline import TimelinePart


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's API key with the name of its owner."""

    caller: str
    """The owner's name in limits and logs. It tells nothing about the key."""
    key: str = field(repr=False)
    named: bool = False
    """Whether the name was given with the key. Then other keys may be of the same owner."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets, keys and certificates that a proxy reads again on SIGHUP."""

    secret: bytes = field(repr=False)
    """The cluster secrets, as ``Secrets`` takes them."""
    keys: tuple[ApiKey, ...]
    """The clients' API keys. If it is empty, every client may send requests."""
    certificate: Certificate | None = None
    authorities: bytes = b""
    """The authorities of nodes' certificates, as PEM; empty for the system's."""
    admin_keys: tuple[ApiKey, ...] = ()
    """The keys with which nodes may be commanded. If it is empty, nobody may."""


class Renewed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="renewed"):
    credentials: Credentials


class KnownNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    info: NodeInfo
    load: NodeLoad
    seen_s: float
    """When the node's last message came, on the monotonic clock, which all processes of a host share."""
    draining: bool = False
    proxies: int = 1
    """How many proxies know the node."""
    met: bool = False
    """As in ``NodeHeartbeat``."""


class Nodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="nodes"):
    """All registered nodes."""

    nodes: tuple[KnownNode, ...]
    prefilled: tuple[str, ...]
    """The fingerprints that have had a prefill node."""
    lost: tuple[BootId, ...]
    """The last nodes that were dropped for their silence. Other nodes that are gone deregistered or were replaced."""


class NodesChanged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="nodes_changed"):
    """What has changed since the last message with nodes."""

    nodes: tuple[KnownNode, ...]
    """The nodes that have come, changed or been heard."""
    prefilled: tuple[str, ...]
    """The fingerprints that have had a prefill node, all of them."""
    lost: tuple[BootId, ...]
    """Those of ``gone`` that were dropped for their silence."""
    gone: tuple[BootId, ...]


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One line of Prometheus text."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One metric, with all its samples."""

    name: str
    documentation: str
    kind: str
    """The type of the metric in Prometheus's words: ``counter``, ``gauge`` or ``histogram``."""
    samples: tuple[Sample, ...]


class Collect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="collect"):
    number: int


class Scraped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="scraped"):
    number: int
    text: bytes


class WorkerPing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ping"):
    pass


class WorkerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hello"):
    version: str
    """The version of pdserve when the worker started."""


class WorkerReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ready"):
    pass


class WorkerPong(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pong"):
    pass


class Scrape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="scrape"):
    number: int


class AskStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ask_status"):
    number: int


class CollectStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="collect_status"):
    number: int


class StatusPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="status_part"):
    number: int
    """The number of the ``CollectStatus`` that this answers."""
    status: RelayStatus


class StatusReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="status_reply"):
    number: int
    report: bytes
    """The report on the whole proxy, as JSON."""


class AskTimeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ask_timeline"):
    number: int
    request_id: RequestId


class CollectTimeline(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="collect_timeline"
):
    number: int
    request_id: RequestId


class CollectedParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="collected_parts"):
    number: int
    """The number of the ``CollectTimeline`` that this answers."""
    parts: tuple[TimelinePart, ...]


class TimelineReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="timeline_reply"):
    number: int
    parts: tuple[TimelinePart, ...]
    """What all workers remember of the requests with the id."""


class SuspectedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request with which two nodes were lost."""

    fingerprint: bytes
    """Stands for its path and its body."""
    size: int
    """The size of its body."""
    request_id: RequestId
    client: bytes
    """Stands for its client, who alone is told of its id."""
    losses: str
    """What is known of how the nodes were lost."""
    until_s: float
    """Until then it is refused, on the monotonic clock, which all processes of a host share."""


class Suspected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="suspected"):
    requests: tuple[SuspectedRequest, ...]


NO_QUESTION = 0
"""The number of ``Counts`` that a worker sends by itself."""


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="counts"):
    number: int
    """The number of the ``Collect`` that this answers, or ``NO_QUESTION``."""
    families: tuple[Family, ...]


class BeginResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="begin_response"):
    number: int
    """The number of the question, and of the response until it is over."""
    owner: str
    previous: str | None
    """The id of the response before it in its conversation."""
    items: bytes
    """The items of its own input, as a JSON list; empty if it will not be stored."""
    prompt_start: bytes


class FinishResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="finish_response"):
    number: int
    response: int
    """The number of its ``BeginResponse``."""
    id: str
    output: bytes
    """Its items, as a JSON list."""
    body: bytes
    """All of it, as JSON."""


class AbandonResponse(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="abandon_response"
):
    response: int
    """The number of its ``BeginResponse``."""


class ResponsePart(enum.Enum):
    """What a client asks for of a response."""

    BODY = "body"
    INPUT_ITEMS = "input_items"


class ReadResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="read_response"):
    number: int
    owner: str
    id: str
    part: ResponsePart


class DeleteResponse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="delete_response"):
    number: int
    owner: str
    id: str


class StoreReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="store_reply"):
    number: int
    found: bool
    """Whether the owner has the response, or the one before it."""
    data: bytes = b""
    """What was asked for, as JSON; of a response that begins, the items before its own."""
    prompt_start: bytes = b""
    stored: bool = False
    """Whether the response will be stored, or is."""


ToWorker: TypeAlias = (
    Nodes
    | NodesChanged
    | Collect
    | Scraped
    | CollectStatus
    | StatusReply
    | CollectTimeline
    | TimelineReply
    | WorkerPing
    | Renewed
    | StoreReply
    | Suspected
)
ToSupervisor: TypeAlias = (
    WorkerHello
    | WorkerReady
    | WorkerPong
    | Scrape
    | Counts
    | AskStatus
    | StatusPart
    | AskTimeline
    | CollectedParts
    | BeginResponse
    | FinishResponse
    | AbandonResponse
    | ReadResponse
    | DeleteResponse
    | Suspected
)
StoreQuestion: TypeAlias = BeginResponse | FinishResponse | ReadResponse | DeleteResponse
