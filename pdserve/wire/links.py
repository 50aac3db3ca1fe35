"""What carries KV blocks between engines."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

LinkCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class TransportKind(enum.Enum):
    """How the blocks of a link travel. Each is the name of a field of ``LinkCounts``."""

    MAPPED = "mapped"
    """The receiver maps the sender's KV cache, and copies blocks out of it."""
    SHARED_MEMORY = "shared_memory"
    RDMA = "rdma"
    TCP = "tcp"
    OTHER = "other"


class LinkCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The number of links that have moved blocks and are open, by what carries their blocks."""

    mapped: LinkCount = 0
    shared_memory: LinkCount = 0
    rdma: LinkCount = 0
    tcp: LinkCount = 0
    other: LinkCount = 0

    @classmethod
    def of(cls, counts: Mapping[TransportKind, int]) -> LinkCounts:
        return cls(**{kind.value: counts.get(kind, 0) for kind in TransportKind})
