"""Identities. One type for each, the same on every channel."""

from __future__ import annotations

import secrets
from typing import Annotated, TypeAlias

import msgspec

BootId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""One start of one node: 16 random bytes. A restarted node on the same address has another."""

RequestUuid: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""One generation in the cluster, made by the decode node; never the client's ``x-request-id``."""


def new_id() -> bytes:
    """16 random bytes, for a boot id or a request uuid."""
    return secrets.token_bytes(16)


class TransferId(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to move one request's KV cache. A retry is another transfer."""

    request: RequestUuid
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1_000)]
    decode_boot: BootId

    def __str__(self) -> str:
        return f"{self.request.hex()[:12]}/{self.attempt}"
