"""How one rank's link is reached: what a handshake passes on as bytes, and only links read."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

LABEL_BITS = 63
"""What a sender may label a message with; the link keeps the other bit of a UCX tag."""

CELLS = 512
"""Links that can offer one memory at once."""

LinkNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class MemoryOffer(msgspec.Struct, frozen=True):
    """Where processes of the same user on the same host find a link's memory, to read it."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    fd: Annotated[int, msgspec.Meta(ge=0)]
    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """Random: a file of this name is the memory that is meant, on whatever host this is read."""
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    cell: Annotated[int, msgspec.Meta(ge=0, lt=CELLS)]
    """Number of the 64 bits before the memory that hold ``nonce`` while what is read there counts."""
    nonce: LinkNumber


class LinkAddress(msgspec.Struct, frozen=True):
    worker: bytes
    """A UCX worker's address."""
    link: LinkNumber
    """Random, so that each side can tell who says that it has attached."""
    offer: MemoryOffer | None = None
