"""The contract for moving messages between the memories of engines.

All calls come from the transfer thread; none blocks for long.
Everything is in batches, because what a call costs is paid for each of thousands of KV blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdserve_kvtransfer.region import Memory

MAX_PIECE_BYTES = 256 * 2**20
"""Larger arrivals are not even read: no engine has blocks of this size."""

DISCARD = -1
"""In the place of a place: receive it, into memory that nobody looks at."""


class ArrivedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that has arrived and is not received yet."""

    label: int
    """``LABEL_BITS`` bits that its sender gave it."""
    length: int
    """Bytes."""


class MovedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message whose memory is the caller's own again: all of it was sent, or has landed."""

    label: int
    place: int
    length: int
    digest: int | None = None
    """Of what has landed, by ``pdserve_kvtransfer.pieces``, if it was made on the way."""


class Link(Protocol):
    """One rank's side of a connection to ranks of one other engine.

    Owns everything that may touch this rank's memory on behalf of that engine. A *place* counts bytes from the start of
    the memory that the link was opened with.
    """

    address: bytes
    """What the other side gives to ``connect``."""

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Once, before the first send, with the other ranks' addresses, which must come from an authentic frame.

        Raises TransferError if one cannot be used.
        """

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        """Begin to send so many messages of ``length`` bytes each. ``to`` counts the addresses of ``connect``.

        Raises PeerLost if the connection is broken, ValueError for what is outside of the memory.
        """

    def progress(self) -> bool:
        """Let data move. True if any did. Raises PeerLost if a message cannot be moved."""

    def sent(self) -> Sequence[MovedMessage]:
        """Since the last call."""

    def arrivals(self) -> Sequence[ArrivedMessage]:
        """The next messages that have arrived, taken off the queue; the next ``receive`` answers all of them."""

    def receive(self, places: Sequence[int]) -> None:
        """Accept the latest arrivals, each at its place or with ``DISCARD``.

        Raises PeerLost if the connection is broken, ValueError for what is outside of the memory.
        """

    def landed(self) -> Sequence[MovedMessage]:
        """Since the last call; nothing of what was discarded."""

    def arm(self) -> bool:
        """Have ``fileno`` become readable at the next news. False if there is news already."""

    def fileno(self) -> int: ...

    def broken(self) -> bool:
        """Whether the transport itself has noticed that the other side is gone. It may never notice."""

    def close(self) -> None:
        """End everything in flight. Afterwards no memory given to this link is read or written. Idempotent."""


class Transport(Protocol):
    """Makes links."""

    def open_link(self, memory: Memory) -> Link:
        """A link for this memory. Raises TransferError, also if it cannot reach that kind of memory."""

    def close(self) -> None:
        """After its links."""
