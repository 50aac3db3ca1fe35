"""The transport of KV blocks between simulated engines: copies real bytes, after the network's delays.

As with UCX, a message is read from its sender's memory only when it lands, so a block that is written again too early
is noticed by its digest. A peer that dies may never be noticed.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.simulation.machine.messaging import Descriptors
from lab.simulation.machine.network import Flow, Network
from lab.simulation.machine.virtual_time import present_process
from pdserve.errors import PeerLost, TransferError
from pdserve.wire.discovery import TransportKind
from pdserve_kvtransfer.region import Memory, host_bytes
from pdserve_kvtransfer.transport import DISCARD, ArrivedMessage, LinkPath, MovedMessage, StepUnderWay

SLOW_S = 0.4
"""By how much messages to a rank whose way is slow come later."""


class BlockFault(enum.Enum):
    """What may happen to one message of a link."""

    CORRUPT = "corrupt"
    """It lands with a wrong byte."""
    TWICE = "twice"
    """It arrives twice."""
    SHORT = "short"
    """A part of it arrives."""
    BREAK = "break"
    """It does not arrive, and both ends of the link break."""


@dataclass(slots=True, eq=False)
class _Message:
    sender: SimLink
    moved: MovedMessage
    fault: BlockFault | None = None
    repeated: bool = False
    """Whether it is the second one of two, of which the sender knows nothing."""

    @property
    def length(self) -> int:
        return self.moved.length // 2 if self.fault is BlockFault.SHORT else self.moved.length


@dataclass(frozen=True, eq=False)
class RankFault:
    """What happens to the next message that one rank of a host sends."""

    host: str
    rank: int
    fault: BlockFault


@dataclass(slots=True, eq=False)
class Fabric:
    """All links of the cluster."""

    network: Network
    descriptors: Descriptors
    links: dict[bytes, SimLink] = field(default_factory=dict)
    faults: Counter[BlockFault] = field(default_factory=Counter)
    """What happens to so many of the next messages."""
    rank_faults: list[RankFault] = field(default_factory=list)
    unreachable: Counter[str] = field(default_factory=Counter)
    """How many faults keep links from being made to or from each host."""
    slow: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How many faults make all messages to one rank of a host late."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """How much of the memory of each host's engine others have got, or thrown away."""
    landed_bytes: Counter[str] = field(default_factory=Counter)
    """How much of other engines' memory each host's engine has got into its own."""

    def end(self, rank_fault: RankFault) -> None:
        """Takes a fault back that has not come yet."""
        if rank_fault in self.rank_faults:
            self.rank_faults.remove(rank_fault)

    def next_fault(self, sender: SimLink) -> BlockFault | None:
        """Returns what happens to the message that this link sends now."""
        for fault in BlockFault:
            if self.faults[fault] > 0:
                self.faults[fault] -= 1
                return fault
        for rank_fault in self.rank_faults:
            if (rank_fault.host, rank_fault.rank) == (sender.process.host, sender.rank):
                self.rank_faults.remove(rank_fault)
                return rank_fault.fault
        return None


class SimLink:
    def __init__(self, fabric: Fabric, memory: memoryview, rank: int) -> None:
        self.memory = memory
        self.rank = rank
        self.process = present_process()
        self.address = f"link {len(fabric.links)}".encode()
        self._fabric = fabric
        self._bell = fabric.descriptors.eventfd()
        self._open = True
        self._busy_until = 0.0
        self._failed = False
        self._peers: list[SimLink] = []
        self._flows: dict[SimLink, Flow] = {}
        self._inbox: deque[_Message] = deque()
        self._arrived: list[_Message] = []
        self._receives: list[tuple[_Message, int]] = []
        self._sent: list[MovedMessage] = []
        self._landed: list[MovedMessage] = []
        fabric.links[self.address] = self

    def connect(self, addresses: Sequence[bytes]) -> None:
        if not all(address in self._fabric.links for address in addresses):
            raise TransferError("no such link")
        hosts = {self.process.host, *(self._fabric.links[address].process.host for address in addresses)}
        if any(self._fabric.unreachable[host] for host in hosts):
            raise TransferError("no way leads there")
        self._peers = [self._fabric.links[address] for address in addresses]

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        peer = self._peers[to]
        self.process.step()
        if self.process.ended:
            return
        for place, label in zip(places, labels, strict=True):
            if not 0 <= place <= len(self.memory) - length:
                raise ValueError(f"{length} bytes at {place} are outside of the memory")
            self._send(peer, MovedMessage(label, place, length))

    def _send(self, peer: SimLink, moved: MovedMessage) -> None:
        flow, fault = self._flow(peer), self._fabric.next_fault(self)
        if fault is BlockFault.BREAK:
            self.fail()
            peer.fail()
            return
        flow.send(_Message(self, moved, fault))
        if fault is BlockFault.TWICE:
            flow.send(_Message(self, moved, repeated=True))

    def fail(self) -> None:
        """Breaks the link at this end."""
        self._failed = True
        self._ring()

    def _flow(self, peer: SimLink) -> Flow:
        if peer not in self._flows:
            self._flows[peer] = Flow(self._fabric.network, self.process, peer.process, peer._arrive)
        return self._flows[peer]

    def _arrive(self, item: object) -> None:
        """Takes what another link has sent, later if this rank's way is slow."""
        loop = self.process.loop
        late_s = SLOW_S if self._fabric.slow[self.process.host, self.rank] else 0.0
        if late_s or loop.time() < self._busy_until:
            # What comes later may not overtake it.
            self._busy_until = max(self._busy_until, loop.time() + late_s)
            loop.call_at(self._busy_until, self._take, item, context=self.process.context)
        else:
            self._take(item)

    def _take(self, item: object) -> None:
        if not self._open:
            return
        match item:
            case _Message():
                self._inbox.append(item)
            case MovedMessage():
                self._sent.append(item)
        self._ring()

    def arrivals(self) -> Sequence[ArrivedMessage]:
        self._arrived = list(self._inbox)
        self._inbox.clear()
        return [ArrivedMessage(message.moved.label, message.length) for message in self._arrived]

    def receive(self, places: Sequence[int]) -> None:
        self._receives += zip(self._arrived, places, strict=True)
        self._arrived = []
        self._ring()

    def progress(self) -> bool:
        bell = self._fabric.descriptors.fd(self._bell)
        if bell.value:
            bell.read()
        if self._failed:
            raise PeerLost("the other link is closed")
        moved = bool(self._sent or self._receives)
        receives, self._receives = self._receives, []
        for message, place in receives:
            self._land(message, place)
        return moved

    def _land(self, message: _Message, place: int) -> None:
        sender, moved = message.sender, message.moved
        if not sender._open or sender.process.ended:
            # The sender's memory must not be read any more, and nothing else would end this receive.
            self._failed |= place != DISCARD
            return
        if place != DISCARD:
            length = message.length
            self.memory[place : place + length] = sender.memory[moved.place : moved.place + length]
            if message.fault is BlockFault.CORRUPT:
                self.memory[place] ^= 1
            self._fabric.landed_bytes[self.process.host] += length
            self._landed.append(MovedMessage(moved.label, place, length))
        if not message.repeated:
            self._fabric.sent_bytes[sender.process.host] += moved.length
            self._flow(sender).send(moved)

    def sent(self) -> Sequence[MovedMessage]:
        sent, self._sent = self._sent, []
        return sent

    def landed(self) -> Sequence[MovedMessage]:
        landed, self._landed = self._landed, []
        return landed

    @property
    def receiving(self) -> int:
        return len(self._receives)

    def arm(self) -> bool:
        return not (self._inbox or self._sent or self._receives)

    def fileno(self) -> int:
        return self._bell

    def _ring(self) -> None:
        if self._open:
            self._fabric.descriptors.fd(self._bell).write()

    def path(self) -> LinkPath:
        return LinkPath(TransportKind.OTHER, "the simulation")

    def broken(self) -> bool:
        return False

    def close(self) -> None:
        if self._open:
            self._open = False
            self._receives.clear()
            self._inbox.clear()
            self._arrived.clear()
            self._fabric.descriptors.close(self._bell)


class LinkTransport:
    """The maker of one rank's links."""

    def __init__(self, fabric: Fabric, rank: int = 0) -> None:
        self._fabric = fabric
        self._rank = rank
        self._links: list[SimLink] = []
        self.step = StepUnderWay()

    def open_link(self, memory: Memory) -> SimLink:
        own = host_bytes(memory)
        assert own is not None
        self._links.append(SimLink(self._fabric, own, self._rank))
        return self._links[-1]

    def close(self) -> None:
        for link in self._links:
            link.close()
