"""The contract for moving blocks. All calls come from the transfer thread; none blocks for long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

MAX_MESSAGE_BYTES = 256 * 2**20
"""Larger arrivals are not even read: no engine has blocks of this size."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A message that has arrived and is not received yet. It must be received, be it into scratch memory."""

    tag: int
    """Which transfer the sender means."""
    index: int
    """Which block of it."""
    length: int
    handle: Any
    """The transport's own."""


class Completion(Protocol):
    """One send or receive in flight."""

    def done(self) -> bool:
        """Whether the memory is the caller's own again."""

    def failed(self) -> bool:
        """Whether it ended without moving the bytes; only meaningful once done."""


class Link(Protocol):
    """One rank's side of a connection to ranks of one other engine.

    Owns everything that may touch this rank's memory on behalf of that engine.
    """

    address: bytes
    """What the other side gives to ``connect``."""

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Once, before the first send, with the other ranks' addresses, which must come from an authentic frame.

        Raises TransferError if one cannot be used.
        """

    def send(self, block: memoryview, tag: int, index: int, to: int = 0) -> Completion:
        """``to`` counts the addresses of ``connect``. Raises PeerLost if the connection is broken."""

    def probe(self) -> Arrival | None:
        """The next message that has arrived, taken off the queue."""

    def receive(self, arrival: Arrival, into: memoryview) -> Completion:
        """Accept a message; ``into`` holds at least its length. Raises PeerLost if the connection is broken."""

    def progress(self) -> bool:
        """Let data move. True if any did."""

    def arm(self) -> bool:
        """Have ``fileno`` become readable at the next news. False if there is news already."""

    def fileno(self) -> int: ...

    def broken(self) -> bool:
        """Whether the transport itself has noticed that the other side is gone. It may never notice."""

    def close(self) -> None:
        """End everything in flight. Afterwards no memory given to this link is read or written. Idempotent."""


class Transport(Protocol):
    """Makes links."""

    def open_link(self) -> Link:
        """Raises TransferError."""

    def close(self) -> None:
        """After its links."""
