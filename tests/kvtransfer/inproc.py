"""A transport between engines of one process, which copies blocks. Tests can make it misbehave."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.discovery import TransportKind
from pdserve.wire.ids import new_id
from pdserve_kvtransfer.region import Memory, host_bytes
from pdserve_kvtransfer.transport import DISCARD, ArrivedMessage, LinkPath, MovedMessage, StepUnderWay


@dataclass(slots=True, eq=False)
class _Message:
    sender: InprocLink
    moved: MovedMessage

    def bytes(self) -> memoryview:
        return self.sender.memory[self.moved.place : self.moved.place + self.moved.length]


@dataclass(slots=True, eq=False)
class _Receive:
    message: _Message
    place: int


@dataclass(slots=True, eq=False)
class Fabric:
    """The links of one process.

    While ``held``, accepted receives stay in flight, as when a sender stops in the middle of a block.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    links: dict[bytes, InprocLink] = field(default_factory=dict)
    held: bool = False

    def hold(self) -> None:
        with self.lock:
            self.held = True

    def stuck(self) -> int:
        """Returns how many accepted receives are in flight."""
        with self.lock:
            return sum(link.receiving for link in self.links.values())

    def release(self) -> None:
        with self.lock:
            self.held = False
            for link in self.links.values():
                link.ring()


class InprocLink:
    def __init__(self, fabric: Fabric, memory: memoryview) -> None:
        self.memory = memory
        self._fabric = fabric
        self.address = new_id()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._broken = False
        self._failed = False
        self._peers: tuple[bytes, ...] = ()
        self._inbox: deque[_Message] = deque()
        self._arrived: list[_Message] = []
        self._receives: list[_Receive] = []
        self._sent: list[MovedMessage] = []
        self._landed: list[MovedMessage] = []
        self.holds: Callable[[int], bool] = lambda label: False
        """Returns whether a message with a label stays in flight once this link has accepted it."""
        with fabric.lock:
            fabric.links[self.address] = self

    def connect(self, addresses: Sequence[bytes]) -> None:
        with self._fabric.lock:
            if not all(address in self._fabric.links for address in addresses):
                raise TransferError("no such link in this process")
            self._peers = tuple(addresses)

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        with self._fabric.lock:
            peer = self._fabric.links.get(self._peers[to])
            if peer is None:
                raise PeerLost("the other link is closed")
            for place, label in zip(places, labels, strict=True):
                if not 0 <= place <= len(self.memory) - length:
                    raise ValueError(f"{length} bytes at {place} are outside of the memory")
                peer._inbox.append(_Message(self, MovedMessage(label, place, length)))
            peer.ring()

    def arrivals(self) -> Sequence[ArrivedMessage]:
        with self._fabric.lock:
            self._arrived = list(self._inbox)
            self._inbox.clear()
            return [ArrivedMessage(message.moved.label, message.moved.length) for message in self._arrived]

    def receive(self, places: Sequence[int]) -> None:
        with self._fabric.lock:
            self._receives += map(_Receive, self._arrived, places)
            self._arrived = []
            self.ring()

    def progress(self) -> bool:
        with self._fabric.lock:
            self._clear_bell()
            if self._failed:
                raise PeerLost("the other link is closed")
            moved = bool(self._sent)
            for receive in (due := self._due()):
                self._land(receive)
                self._receives.remove(receive)
            return moved or bool(due)

    def _due(self) -> list[_Receive]:
        """Returns the receives that may land now."""
        if self._fabric.held:
            return []
        return [receive for receive in self._receives if not self.holds(receive.message.moved.label)]

    def _land(self, receive: _Receive) -> None:
        message, place = receive.message, receive.place
        if not message.sender._open:
            # The sender's memory must not be read any more, and nothing else would end this receive.
            self._failed |= place != DISCARD
            return
        if place != DISCARD:
            self.memory[place : place + message.moved.length] = message.bytes()
            self._landed.append(MovedMessage(message.moved.label, place, message.moved.length))
        message.sender._sent.append(message.moved)
        message.sender.ring()

    def sent(self) -> Sequence[MovedMessage]:
        with self._fabric.lock:
            sent, self._sent = self._sent, []
            return sent

    def landed(self) -> Sequence[MovedMessage]:
        landed, self._landed = self._landed, []
        return landed

    @property
    def receiving(self) -> int:
        return len(self._receives)

    def arm(self) -> bool:
        with self._fabric.lock:
            return not self._inbox and not self._sent and not self._due()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        if self._open:
            os.eventfd_write(self._fd, 1)

    def _clear_bell(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def path(self) -> LinkPath:
        return LinkPath(TransportKind.OTHER, "this process")

    def broken(self) -> bool:
        return self._broken

    def sever(self) -> None:
        """Breaks the link, as when the transport notices a dead peer."""
        self._broken = True
        self.ring()

    def close(self) -> None:
        with self._fabric.lock:
            if not self._open:
                return
            self._open = False
            del self._fabric.links[self.address]
            for message in (*self._inbox, *self._arrived):
                message.sender._failed = True
                message.sender.ring()
            self._receives.clear()
            self._inbox.clear()
            self._arrived.clear()
            os.close(self._fd)


class InprocTransport:
    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.links: list[InprocLink] = []
        self.step = StepUnderWay()

    def open_link(self, memory: Memory) -> InprocLink:
        own = host_bytes(memory)
        if own is None:
            raise TransferError("copies within a process are of host memory")
        link = InprocLink(self._fabric, own)
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
