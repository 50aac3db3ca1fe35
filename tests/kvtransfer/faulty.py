"""A transport around a sound one, in which every n-th send or receive goes wrong in a stated way."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pdserve.errors import PeerLost
from pdserve_kvtransfer.region import Memory, host_bytes
from pdserve_kvtransfer.transport import ArrivedMessage, Link, LinkPath, MovedMessage, StepUnderWay, Transport


class Fault(enum.Enum):
    CORRUPT = "one bit of a block is flipped on its way"
    TRUNCATE = "the end of a block is missing"
    DUPLICATE = "a block is sent twice"
    REORDER = "a block is overtaken by the next"
    SWAP = "a block travels under the index of another"
    FOREIGN = "a block of another transfer comes first, under this one's tag"
    SEND_FAILS = "a send is refused"
    RECEIVE_FAILS = "a receive is refused"


HARMLESS = frozenset({Fault.DUPLICATE, Fault.REORDER})
"""The faults that a transfer must survive."""


AT_RECEIVER = frozenset({Fault.CORRUPT, Fault.RECEIVE_FAILS})
"""The faults that the receiving side's transport makes."""


@dataclass(slots=True)
class Injector:
    """Counts the operations of all links of one transport, and chooses those that go wrong."""

    fault: Fault
    every: int
    operations: int = 0
    injected: int = 0

    def strikes(self) -> bool:
        self.operations += 1
        struck = self.operations % self.every == 0
        self.injected += struck
        return struck


@dataclass(slots=True)
class FaultyTransport:
    """Makes links of ``inner`` whose operations the injector disturbs."""

    inner: Transport
    injector: Injector
    step: StepUnderWay = field(default_factory=StepUnderWay)

    def open_link(self, memory: Memory) -> Link:
        own = host_bytes(memory)
        assert own is not None
        return FaultyLink(self.inner.open_link(memory), own, self.injector)

    def close(self) -> None:
        self.inner.close()


class Held(NamedTuple):
    """A send that waits to be overtaken."""

    place: int
    length: int
    label: int


@dataclass(slots=True)
class FaultyLink:
    inner: Link
    memory: memoryview
    injector: Injector
    held: list[Held] = field(default_factory=list)
    twice: Counter[int] = field(default_factory=Counter)
    """The number of completions of each label that are not the last one."""
    address: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.inner.address

    def connect(self, addresses: Sequence[bytes]) -> None:
        self.inner.connect(addresses)

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        assert to == 0, "one rank on the other side"
        for place, label in zip(places, labels, strict=True):
            if self.injector.fault in AT_RECEIVER or not self.injector.strikes():
                self.inner.send([place], length, [label])
                self._let_go()
            else:
                self._send_badly(place, length, label)

    def _send_badly(self, place: int, length: int, label: int) -> None:
        match self.injector.fault:
            case Fault.TRUNCATE:
                self.inner.send([place], length - 1, [label])
            case Fault.DUPLICATE:
                self.twice[label] += 1
                self.inner.send([place, place], length, [label, label])
            case Fault.REORDER:
                self.held.append(Held(place, length, label))
            case Fault.SWAP:
                self.inner.send([place], length, [label ^ 1])
            case Fault.FOREIGN:
                self.twice[label] += 1
                self.inner.send([self._elsewhere(place, length), place], length, [label, label])
            case _:
                raise PeerLost("a send was refused")

    def _elsewhere(self, place: int, length: int) -> int:
        """Returns the place of other bytes in this memory."""
        wanted = self.memory[place : place + length]
        others = range(0, len(self.memory) - length + 1, length)
        return next(other for other in others if self.memory[other : other + length] != wanted)

    def _let_go(self) -> None:
        for held in self.held:
            self.inner.send([held.place], held.length, [held.label])
        self.held.clear()

    def sent(self) -> Sequence[MovedMessage]:
        return [moved for moved in self.inner.sent() if not self._first_of_two(moved.label)]

    def _first_of_two(self, label: int) -> bool:
        first = self.twice[label] > 0
        self.twice[label] -= first
        return first

    def arrivals(self) -> Sequence[ArrivedMessage]:
        return self.inner.arrivals()

    def receive(self, places: Sequence[int]) -> None:
        if self.injector.fault is Fault.RECEIVE_FAILS and any(self.injector.strikes() for _ in places):
            raise PeerLost("a receive was refused")
        self.inner.receive(places)

    def landed(self) -> Sequence[MovedMessage]:
        landed = self.inner.landed()
        if self.injector.fault is not Fault.CORRUPT:
            return landed
        return [self._corrupted(moved) if self.injector.strikes() else moved for moved in landed]

    def _corrupted(self, moved: MovedMessage) -> MovedMessage:
        # This is the highest bit of a number's exponent, in fp32 and bf16. Unnoticed, it would cause a wrong token.
        self.memory[moved.place + (moved.length // 2 | 3)] ^= 0x40
        # The digest is that of the former bytes; without it, the corrupted ones seem to have come.
        return msgspec.structs.replace(moved, digest=None)

    def progress(self) -> bool:
        self._let_go()
        return self.inner.progress()

    def arm(self) -> bool:
        return self.inner.arm()

    def fileno(self) -> int:
        return self.inner.fileno()

    def path(self) -> LinkPath:
        return self.inner.path()

    def broken(self) -> bool:
        return self.inner.broken()

    def close(self) -> None:
        self.held.clear()
        self.inner.close()


def faulty(make: Callable[[], Transport], injector: Injector) -> Callable[[], Transport]:
    return lambda: FaultyTransport(make(), injector)
