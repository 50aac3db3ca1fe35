"""A proxy's supervisor ↔ its workers, over a ZMQ ROUTER in a folder only the user can enter, so not authenticated.

A worker says ``WorkerHello`` and is sent ``Nodes``, then again at every change. Once it takes connections it says
``WorkerReady``. A worker whose event loop turns answers each ``WorkerPing`` with ``WorkerPong``.
A worker that is asked for ``/metrics`` sends ``Scrape``; the supervisor sends ``Collect`` to every worker, adds up the
``Counts`` that come back, and answers ``Scraped``. When it has read its files again, it sends ``Renewed``.
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
    """Of a client."""

    caller: str
    """For limits, logs and metrics; says nothing of the key."""
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a proxy signs with, shows and believes."""

    secret: bytes = field(repr=False)
    """What ``Secrets`` are made of."""
    keys: tuple[ApiKey, ...]
    """Empty: anybody may come."""
    certificate: Certificate | None = None
    authorities: bytes = b""
    """PEM, of nodes' certificates; empty for the system's."""


class Renewed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="renewed"):
    credentials: Credentials


class KnownNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    info: NodeInfo
    load: NodeLoad
    seen_s: float
    """When its last message came, on the monotonic clock, which all processes of a host share."""


class Nodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="nodes"):
    """All that are registered."""

    nodes: tuple[KnownNode, ...]
    prefilled: tuple[str, ...]
    """Fingerprints that have had a prefill node."""
    lost: tuple[BootId, ...]
    """The last that were dropped for their silence. Others that are gone have said goodbye, or have been replaced."""


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
    """As Prometheus has it: ``counter``, ``gauge``, ``histogram``."""
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
    """Of pdserve, when the worker started."""


class WorkerReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ready"):
    pass


class WorkerPong(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pong"):
    pass


class Scrape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="scrape"):
    number: int


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="counts"):
    number: int
    """Of the ``Collect`` that this answers."""
    families: tuple[Family, ...]


ToWorker: TypeAlias = Nodes | Collect | Scraped | WorkerPing | Renewed
ToSupervisor: TypeAlias = WorkerHello | WorkerReady | WorkerPong | Scrape | Counts
