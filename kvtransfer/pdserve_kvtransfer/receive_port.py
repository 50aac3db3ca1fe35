"""One decode rank's end of the link to one prefill engine: which arrivals may land, and where.

Commands and reports are those of ``pdserve.wire.rank_transfer``. A piece is received only when it has arrived and its
transfer is known to be alive, so nothing is written that was not asked for.
"""

from __future__ import annotations

import enum

import msgspec

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.rank_transfer import (
    CloseLink,
    ConnectLink,
    Dropped,
    Expect,
    Expecting,
    Forget,
    Forgotten,
    LinkCommand,
    PieceLanded,
    RankReport,
    Released,
)
from pdserve_kvtransfer.digest import digest
from pdserve_kvtransfer.head_map import Piece, head_map, heads_of
from pdserve_kvtransfer.in_flight import InFlight
from pdserve_kvtransfer.port_link import PortLink
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import MAX_MESSAGE_BYTES, Arrival, Completion, Transport


class _State(enum.IntEnum):
    MISSING = 0
    ACCEPTED = 1
    LANDED = 2


class _Landing:
    """One transfer's pieces on this rank."""

    def __init__(self, expect: Expect, slots: int) -> None:
        self.expect = expect
        self.slots = slots
        self.forgotten = False
        self._states = bytearray(len(expect.block_ids) * slots)
        self._missing = len(self._states)
        self._in_flight: dict[int, int] = {}

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Blocks with accepted pieces that have not landed."""
        return tuple(self._in_flight)

    def accept(self, index: int) -> int | None:
        """The block that this piece belongs to; None if it may not land."""
        at = index - self.expect.first_block * self.slots
        if self.forgotten or not 0 <= at < len(self._states) or self._states[at] != _State.MISSING:
            return None
        self._states[at] = _State.ACCEPTED
        block_id = self.expect.block_ids[at // self.slots]
        self._in_flight[block_id] = self._in_flight.get(block_id, 0) + 1
        return block_id

    def landed(self, index: int) -> int | None:
        """The block whose last accepted piece this was, if it was."""
        at = index - self.expect.first_block * self.slots
        self._states[at] = _State.LANDED
        self._missing -= 1
        block_id = self.expect.block_ids[at // self.slots]
        self._in_flight[block_id] -= 1
        if self._in_flight[block_id]:
            return None
        del self._in_flight[block_id]
        return block_id


class _Receiving(msgspec.Struct, frozen=True, gc=False):
    completion: Completion
    landing: _Landing | None
    """None for what lands in scratch memory."""
    index: int
    into: memoryview

    def done(self) -> bool:
        return self.completion.done()


class ReceivePort:
    """``reports`` collects what rank 0 is to be told; whoever drives the port empties it."""

    def __init__(self, link: int, rank: int, ranks: int, kv_heads: int, region: KvRegion, transport: Transport) -> None:
        """Raises TransferError if the transport cannot open a link."""
        self._port = PortLink(link, transport)
        self._rank, self._ranks, self._kv_heads = rank, ranks, kv_heads
        self._region = region
        self._head_bytes = region.block_bytes // len(heads_of(rank, ranks, kv_heads))
        self._pieces: tuple[Piece, ...] = ()
        self._landings: dict[int, _Landing] = {}
        self._receiving: InFlight[_Receiving] = InFlight()
        self._scratch = memoryview(bytearray(region.block_bytes))

    @property
    def reports(self) -> list[RankReport]:
        return self._port.reports

    def handle(self, command: LinkCommand) -> None:
        match command:
            case ConnectLink(addresses=addresses):
                self._connect(addresses)
            case Expect(tag=tag):
                self._landings[tag] = _Landing(command, len(self._pieces))
                self.reports.append(Expecting(self._port.number, tag))
            case Forget(tag=tag):
                self._forget(tag)
            case CloseLink():
                self.close()
                self._port.report_closed()
            case _:
                raise TypeError(f"{type(command).__name__} is not for the receiving side")

    def _connect(self, addresses: tuple[bytes, ...]) -> None:
        mine = [piece for piece in head_map(self._kv_heads, len(addresses), self._ranks) if piece.target == self._rank]
        self._pieces = tuple(mine)
        try:
            self._port.link.connect([addresses[source] for source in sorted({piece.source for piece in mine})])
        except TransferError as exc:
            self._port.found_broken(str(exc))

    def _forget(self, tag: int) -> None:
        landing = self._landings.get(tag)
        in_flight = () if landing is None else landing.in_flight
        if landing is not None:
            landing.forgotten = True
            if not in_flight:
                del self._landings[tag]
        self.reports.append(Forgotten(self._port.number, tag, in_flight))

    def turn(self) -> bool:
        """Let data move. True if any did."""
        if self._port.broken:
            return False
        try:
            moved = self._port.link.progress()
            while (arrival := self._port.link.probe()) is not None:
                self._receive(arrival)
                moved = True
            if self._receiving:
                self._complete()
            if self._port.link.broken():
                raise PeerLost("the connection that carries KV blocks broke")
        except PeerLost as exc:
            self._port.found_broken(str(exc))
            return False
        return moved

    def _receive(self, arrival: Arrival) -> None:
        landing = self._landings.get(arrival.tag)
        into = None if landing is None else self._destination(landing, arrival)
        if into is None:
            landing, into = None, self._scratch_for(arrival.length)
            self.reports.append(Dropped(self._port.number))
        self._receiving.add(_Receiving(self._port.link.receive(arrival, into), landing, arrival.index, into))

    def _destination(self, landing: _Landing, arrival: Arrival) -> memoryview | None:
        piece = self._pieces[arrival.index % landing.slots]
        if arrival.length != piece.heads * self._head_bytes:
            return None
        block_id = landing.accept(arrival.index)
        if block_id is None:
            return None
        first = piece.target_head * self._head_bytes
        return self._region.part(block_id, first, arrival.length)

    def _scratch_for(self, length: int) -> memoryview:
        if length > MAX_MESSAGE_BYTES:
            raise PeerLost(f"the prefill engine sent a block of {length} bytes")
        return self._scratch if length <= self._scratch.nbytes else memoryview(bytearray(length))

    def _complete(self) -> None:
        for receiving in self._receiving.take_done():
            if receiving.landing is None:
                continue
            if receiving.completion.failed():
                raise PeerLost("a KV block broke off")
            self._landed(receiving.landing, receiving)

    def _landed(self, landing: _Landing, receiving: _Receiving) -> None:
        tag = landing.expect.tag
        released = landing.landed(receiving.index)
        if landing.forgotten:
            if released is not None:
                self.reports.append(Released(self._port.number, tag, (released,)))
            if not landing.in_flight:
                del self._landings[tag]
            return
        found = digest(receiving.into, tag, receiving.index) if landing.expect.digests else 0
        self.reports.append(PieceLanded(self._port.number, tag, receiving.index, receiving.into.nbytes, found))
        if landing.complete:
            del self._landings[tag]

    def moving(self) -> bool:
        return bool(self._receiving)

    def arm(self) -> bool:
        return self._receiving.settled() and self._port.arm()

    def fileno(self) -> int:
        return self._port.link.fileno()

    def close(self) -> None:
        """Idempotent. Nothing is written afterwards."""
        self._port.close()
        self._receiving.clear()
        self._landings.clear()
