"""Blocks between engines of one process, by copying: for tests, which can also make it misbehave."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.ids import new_id
from pdserve_kvtransfer.transport import Arrival


@dataclass(slots=True, eq=False)
class InprocCompletion:
    finished: bool = False
    error: bool = False

    def done(self) -> bool:
        return self.finished

    def failed(self) -> bool:
        return self.error

    def finish(self, error: bool) -> None:
        if not self.finished:
            self.finished, self.error = True, error


@dataclass(slots=True, eq=False)
class _Message:
    sender: InprocLink
    block: memoryview
    tag: int
    index: int
    sent: InprocCompletion


@dataclass(slots=True, eq=False)
class _Receive:
    message: _Message
    into: memoryview
    completion: InprocCompletion


@dataclass(slots=True, eq=False)
class Fabric:
    """What the links of one process have in common.

    While ``held``, accepted receives stay in flight, as when a sender stops in the middle of a block.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    links: dict[bytes, InprocLink] = field(default_factory=dict)
    held: bool = False

    def hold(self) -> None:
        with self.lock:
            self.held = True

    def stuck(self) -> int:
        """Accepted receives in flight."""
        with self.lock:
            return sum(link.receiving for link in self.links.values())

    def release(self) -> None:
        with self.lock:
            self.held = False
            for link in self.links.values():
                link.ring()


class InprocLink:
    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.address = new_id()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._broken = False
        self._peers: tuple[bytes, ...] = ()
        self._inbox: deque[_Message] = deque()
        self._sends: list[InprocCompletion] = []
        self._receives: list[_Receive] = []
        with fabric.lock:
            fabric.links[self.address] = self

    def connect(self, addresses: Sequence[bytes]) -> None:
        with self._fabric.lock:
            if not all(address in self._fabric.links for address in addresses):
                raise TransferError("no such link in this process")
            self._peers = tuple(addresses)

    def send(self, block: memoryview, tag: int, index: int, to: int = 0) -> InprocCompletion:
        with self._fabric.lock:
            peer = self._fabric.links.get(self._peers[to])
            if peer is None:
                raise PeerLost("the other link is closed")
            completion = InprocCompletion()
            self._sends.append(completion)
            peer._inbox.append(_Message(self, block, tag, index, completion))
            peer.ring()
            return completion

    def probe(self) -> Arrival | None:
        with self._fabric.lock:
            if not self._inbox:
                return None
            message = self._inbox.popleft()
            return Arrival(message.tag, message.index, message.block.nbytes, message)

    def receive(self, arrival: Arrival, into: memoryview) -> InprocCompletion:
        with self._fabric.lock:
            completion = InprocCompletion()
            self._receives.append(_Receive(arrival.handle, into[: arrival.length], completion))
            self.ring()
            return completion

    def progress(self) -> bool:
        with self._fabric.lock:
            self._clear_bell()
            self._sends = [send for send in self._sends if not send.finished]
            if self._fabric.held or not self._receives:
                return False
            for receive in self._receives:
                self._land(receive)
            self._receives.clear()
            return True

    def _land(self, receive: _Receive) -> None:
        message = receive.message
        if message.sent.finished:
            # The sender has closed: its memory is no longer ours to read, and nobody will end this receive.
            receive.completion.finish(error=True)
            return
        receive.into[:] = message.block
        receive.completion.finish(error=False)
        message.sent.finish(error=False)
        message.sender.ring()

    @property
    def receiving(self) -> int:
        return len(self._receives)

    def arm(self) -> bool:
        with self._fabric.lock:
            return not self._inbox and (self._fabric.held or not self._receives)

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

    def broken(self) -> bool:
        return self._broken

    def sever(self) -> None:
        """As when the transport notices a dead peer."""
        self._broken = True
        self.ring()

    def close(self) -> None:
        with self._fabric.lock:
            if not self._open:
                return
            self._open = False
            del self._fabric.links[self.address]
            for send in self._sends:
                send.finish(error=True)
            for receive in self._receives:
                receive.completion.finish(error=True)
            for message in self._inbox:
                message.sent.finish(error=True)
                message.sender.ring()
            self._receives.clear()
            self._inbox.clear()
            os.close(self._fd)


class InprocTransport:
    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.links: list[InprocLink] = []

    def open_link(self) -> InprocLink:
        link = InprocLink(self._fabric)
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
