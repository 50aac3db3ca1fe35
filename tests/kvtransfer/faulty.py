"""A transport that misbehaves now and then: every n-th send or receive of an honest one goes wrong in a stated way."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.errors import PeerLost
from pdserve_kvtransfer.transport import Arrival, Completion, Link, Transport


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
"""What a transfer must survive."""


@dataclass(slots=True)
class Injector:
    """Counts operations over all links of one transport, and says which go wrong."""

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

    def open_link(self) -> Link:
        return FaultyLink(self.inner.open_link(), self.injector)

    def close(self) -> None:
        self.inner.close()


class Both:
    """Two operations in one."""

    def __init__(self, *completions: Completion) -> None:
        self._completions = completions

    def done(self) -> bool:
        return all(completion.done() for completion in self._completions)

    def failed(self) -> bool:
        return any(completion.failed() for completion in self._completions)


@dataclass(slots=True)
class Held:
    """A send that waits to be overtaken."""

    block: memoryview
    tag: int
    index: int
    begun: Completion | None = None

    def done(self) -> bool:
        return self.begun is not None and self.begun.done()

    def failed(self) -> bool:
        return self.begun is not None and self.begun.failed()


@dataclass(slots=True)
class FaultyLink:
    inner: Link
    injector: Injector
    held: list[Held] = field(default_factory=list)
    address: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.inner.address

    def connect(self, addresses: Sequence[bytes]) -> None:
        self.inner.connect(addresses)

    def send(self, block: memoryview, tag: int, index: int, to: int = 0) -> Completion:
        send = self.inner.send
        if self.injector.fault is Fault.RECEIVE_FAILS or not self.injector.strikes():
            sent = send(block, tag, index)
            self._let_go()
            return sent
        match self.injector.fault:
            case Fault.CORRUPT:
                return send(_flipped(block), tag, index)
            case Fault.TRUNCATE:
                return send(block[:-1], tag, index)
            case Fault.DUPLICATE:
                return Both(send(block, tag, index), send(block, tag, index))
            case Fault.REORDER:
                self.held.append(Held(block, tag, index))
                return self.held[-1]
            case Fault.SWAP:
                return send(block, tag, index ^ 1)
            case Fault.FOREIGN:
                return Both(send(_flipped(block), tag, index), send(block, tag, index))
            case _:
                raise PeerLost("a send was refused")

    def _let_go(self) -> None:
        for held in self.held:
            held.begun = self.inner.send(held.block, held.tag, held.index)
        self.held.clear()

    def probe(self) -> Arrival | None:
        return self.inner.probe()

    def receive(self, arrival: Arrival, into: memoryview) -> Completion:
        if self.injector.fault is Fault.RECEIVE_FAILS and self.injector.strikes():
            raise PeerLost("a receive was refused")
        return self.inner.receive(arrival, into)

    def progress(self) -> bool:
        self._let_go()
        return self.inner.progress()

    def arm(self) -> bool:
        return self.inner.arm()

    def fileno(self) -> int:
        return self.inner.fileno()

    def broken(self) -> bool:
        return self.inner.broken()

    def close(self) -> None:
        self.held.clear()
        self.inner.close()


def _flipped(block: memoryview) -> memoryview:
    copy = bytearray(block)
    # The highest bit of a number's exponent, in fp32 and bf16: what went unnoticed would be a wrong token.
    copy[len(copy) // 2 | 3] ^= 0x40
    return memoryview(copy)


def faulty(make: Callable[[], Transport], injector: Injector) -> Callable[[], Transport]:
    return lambda: FaultyTransport(make(), injector)
