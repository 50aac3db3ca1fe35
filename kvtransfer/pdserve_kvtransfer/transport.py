"""The contract for moving messages between the memories of engines, and how a thread polls for them.

All calls come from the transfer thread, and none blocks for long. Calls take batches, because the cost of one call for
each of thousands of KV blocks adds up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdserve.wire.discovery import TransportKind
from pdserve_kvtransfer.region import Memory

MAX_PIECE_BYTES = 256 * 2**20
"""The longest message that is received. No engine has blocks of this size."""

DISCARD = -1
"""Stands for the place of a message that is received into scratch memory and ignored."""


class ArrivedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that has arrived and is not received yet."""

    label: int
    """The label that its sender gave it (see ``pdserve_kvtransfer.pieces``)."""
    length: int
    """The number of its bytes."""


class MovedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message that was sent or has landed in full, so that the link no longer uses its memory."""

    label: int
    place: int
    length: int
    digest: int | None = None
    """The digest of a landed piece, if the link computed it on the way."""


class LinkPath(msgspec.Struct, frozen=True):
    """What carries the messages of a link."""

    kind: TransportKind
    lanes: str
    """Transports and devices, for people."""
    no_rdma: str = ""
    """Why this is TCP, although this machine has RDMA devices; empty if it is not, or if there are none."""


class Link(Protocol):
    """One rank's side of a connection to ranks of one other engine.

    A link owns everything that may touch this rank's memory on behalf of that engine. A *place* counts bytes from the
    start of the memory that the link was opened with.
    """

    address: bytes
    """The bytes that the other side gives to ``connect``."""

    def connect(self, addresses: Sequence[bytes]) -> None:
        """Connects to the other ranks, whose addresses must come from an authentic frame.

        It is called once, before the first send. Raises TransferError if an address cannot be used.
        """

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        """Begins to send a message of ``length`` bytes from each place. ``to`` counts the addresses of ``connect``.

        Raises PeerLost if the connection is broken, and ValueError for a place outside of the memory.
        """

    def progress(self) -> bool:
        """Lets data move. Returns whether any did. Raises PeerLost if a message cannot be moved."""

    def sent(self) -> Sequence[MovedMessage]:
        """Returns the messages that were sent since the last call."""

    def arrivals(self) -> Sequence[ArrivedMessage]:
        """Takes the next messages that have arrived. The next ``receive`` must answer all of them."""

    def receive(self, places: Sequence[int]) -> None:
        """Receives the latest arrivals, each at its place, or discards those with ``DISCARD``.

        Raises PeerLost if the connection is broken, and ValueError for a place outside of the memory.
        """

    def landed(self) -> Sequence[MovedMessage]:
        """Returns the messages that have landed since the last call, without those that were discarded."""

    def arm(self) -> bool:
        """Makes ``fileno`` become readable at the next news. Returns False if there is news already."""

    def fileno(self) -> int: ...

    def path(self) -> LinkPath:
        """Returns what carries the messages. It is known once one has moved."""

    def broken(self) -> bool:
        """Returns whether the transport has noticed that the other side is gone. It may never notice."""

    def close(self) -> None:
        """Ends everything in flight. From then on no memory of this link is read or written. Idempotent."""


class StepUnderWay:
    """Says whether requests decode in the step that this process computes, on the cores of the transfer thread.

    Another thread may set it at any time.
    """

    def __init__(self) -> None:
        self.decodes = False


class Transport(Protocol):
    """The maker of links."""

    step: StepUnderWay
    """Says when links have to leave the core to a step. Whoever owns the thread may put another one here."""

    def open_link(self, memory: Memory) -> Link:
        """Returns a link for this memory. Raises TransferError, also if it cannot reach that kind of memory."""

    def close(self) -> None:
        """Frees the transport, whose links must be closed."""


# While blocks move, sleeping this long between two polls lets a batch of UCX's fragments gather. A thread that is woken
# for each fragment moves a tenth of the bytes a second, and one that spins takes the core from the sender.
_PAUSE_S = 50e-6
_BUSY_WINDOW_S = 2e-3

_YIELDS = 5.0
"""Beside a decode step a thread pauses for so many times the CPU time that it has used: it takes a sixth of a core."""
_LEAST_USED_S = 200e-6
"""So much CPU time is used between two pauses, of which each takes some itself."""
_MOST_PAUSE_S = 20e-3


class BusyPoll:
    """Decides for a loop whether it polls again or waits to be woken. It remembers when data last moved.

    While a step decodes, the thread pauses, so that blocks that come in leave most of the core to the step. A lower
    priority would do the same, but would let also the first message wait for the end of the step's turn on the core.
    """

    def __init__(self, step: StepUnderWay | None = None) -> None:
        self._moved_at = -math.inf
        self._step = StepUnderWay() if step is None else step
        self._used_s: float | None = None
        """The thread's CPU time after its last pause, or when it first saw the present step."""

    def again(self, moved: bool, moving: bool, now: float) -> bool:
        """Returns whether to poll again without waiting to be woken. It may have slept for a moment."""
        if self._step.decodes:
            self._yield()
        else:
            self._used_s = None
        if moved:
            self._moved_at = now
            return True
        if moving and now - self._moved_at < _BUSY_WINDOW_S:
            time.sleep(_PAUSE_S)
            return True
        return False

    def _yield(self) -> None:
        used_s = time.thread_time()
        if self._used_s is None:
            self._used_s = used_s
        elif used_s - self._used_s >= _LEAST_USED_S:
            time.sleep(min(_MOST_PAUSE_S, _YIELDS * (used_s - self._used_s)))
            self._used_s = used_s
