"""A proxy's supervisor ↔ its workers, over a ZMQ ROUTER in a folder only the user can enter, without signatures.

A worker sends ``WorkerHello``, and gets ``Nodes`` then and at every change. When it takes connections, it sends
``WorkerReady``. A worker answers each ``WorkerPing`` with ``WorkerPong``, unless its event loop hangs. A worker that is
asked for ``/metrics`` sends ``Scrape``; the supervisor sends ``Collect`` to every worker, adds up the ``Counts`` that
come back, and answers ``Scraped``. When the supervisor has read its files again, it sends ``Renewed``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from pdserve.http.tls import Certificate
from pdserve.wire.discovery import NodeInfo, NodeLoad
from pdserve.wire.ids import BootId


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's API key with the name of its owner."""

    caller: str
    """The owner's name in limits and logs. It tells nothing about the key."""
    key: str = field(repr=False)


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


class Renewed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="renewed"):
    credentials: Credentials


class KnownNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    info: NodeInfo
    load: NodeLoad
    seen_s: float
    """When the node's last message came, on the monotonic clock, which all processes of a host share."""
    draining: bool = False


class Nodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="nodes"):
    """All registered nodes."""

    nodes: tuple[KnownNode, ...]
    prefilled: tuple[str, ...]
    """The fingerprints that have had a prefill node."""
    lost: tuple[BootId, ...]
    """The last nodes that were dropped for their silence. Other nodes that are gone deregistered or were replaced."""


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


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="counts"):
    number: int
    """The number of the ``Collect`` that this answers."""
    families: tuple[Family, ...]


ToWorker: TypeAlias = Nodes | Collect | Scraped | WorkerPing | Renewed
ToSupervisor: TypeAlias = WorkerHello | WorkerReady | WorkerPong | Scrape | Counts
