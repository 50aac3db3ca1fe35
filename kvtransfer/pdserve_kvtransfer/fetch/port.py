"""One decode rank's end of the link to one prefill engine. It decides which arrivals may land, and where.

Commands and reports are those of ``pdserve.wire.rank``. A piece is received only when it has arrived and its
transfer is known to be alive, so no memory is written that no transfer has asked for.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.errors import PeerLost
from pdserve.wire.rank import (
    CloseLink,
    ConnectLink,
    Dropped,
    Expect,
    Expecting,
    ExpectMore,
    Forget,
    Forgotten,
    LinkClosed,
    LinkCommand,
    PiecesLanded,
    RankReport,
    Released,
)
from pdserve_kvtransfer.pieces import digest, group_maps, heads_of, index_of, tag_of
from pdserve_kvtransfer.ranks import RankLink
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import DISCARD, MAX_PIECE_BYTES, ArrivedMessage, MovedMessage, Transport


class _PieceState(enum.IntEnum):
    MISSING = 0
    ACCEPTED = 1
    LANDED = 2


class _Landing:
    """The state of one transfer's pieces on this rank."""

    def __init__(self, expect: Expect, most_parts: int, parts: Callable[[Sequence[int]], int]) -> None:
        """A block has ``most_parts`` indexes; ``parts`` returns how many pieces make all of these blocks."""
        self.expect = expect
        self.most_parts = most_parts
        self.forgotten = False
        self._parts = parts
        self.block_ids: list[int] = []
        self._states = bytearray()
        self._missing = 0
        self._in_flight: dict[int, int] = {}
        self.grow(expect.block_ids)

    def grow(self, block_ids: Sequence[int]) -> None:
        """Lets the transfer's next blocks land, too."""
        self.block_ids += block_ids
        self._states += bytes(len(block_ids) * self.most_parts)
        self._missing += self._parts(block_ids)

    @property
    def complete(self) -> bool:
        """Whether no more pieces will land. A paced transfer may always go on."""
        return not self._missing and not self.expect.paced

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The blocks with accepted pieces that have not landed."""
        return tuple(self._in_flight)

    def awaited(self, index: int) -> int:
        """Returns the place of this piece among those of the transfer, or -1 if the piece may not land."""
        at = index - self.expect.first_block * self.most_parts
        if self.forgotten or not 0 <= at < len(self._states) or self._states[at] != _PieceState.MISSING:
            return -1
        return at

    def accept(self, at: int, block_id: int) -> None:
        """Notes that the piece at this place, which is of this block, is received."""
        self._states[at] = _PieceState.ACCEPTED
        self._in_flight[block_id] = self._in_flight.get(block_id, 0) + 1

    def landed(self, index: int) -> int | None:
        """Returns the piece's block if no other accepted piece of it is still to land, and None otherwise."""
        at = index - self.expect.first_block * self.most_parts
        self._states[at] = _PieceState.LANDED
        self._missing -= 1
        block_id = self.block_ids[at // self.most_parts]
        self._in_flight[block_id] -= 1
        if self._in_flight[block_id]:
            return None
        del self._in_flight[block_id]
        return block_id


@dataclass(frozen=True, slots=True)
class _Run:
    """The bytes of a piece in the blocks of a group: block i has them at ``base + i * stride``."""

    base: int
    stride: int
    length: int


class FetchPort:
    """A ``ranks.Port`` for ``Direction.FETCH``. It does not offer its memory to the other engine, which sends only."""

    def __init__(
        self, link: int, rank: int, ranks: int, heads: Sequence[int], region: KvRegion, transport: Transport
    ) -> None:
        """Opens the link. ``heads`` are those of each group. Raises TransferError if the transport cannot."""
        self._link = RankLink(link, transport, region.unshared_memory)
        self._rank, self._ranks, self._heads = rank, ranks, heads
        self._region = region
        self._most_parts = 0
        self._runs: list[list[_Run]] = []
        """The pieces that make a block of each group on this rank."""
        self._landings: dict[int, _Landing] = {}
        self._in_flight = 0

    @property
    def reports(self) -> list[RankReport]:
        return self._link.reports

    def handle(self, command: LinkCommand) -> None:
        match command:
            case ConnectLink(addresses=addresses):
                self._link.attempt(lambda: self._connect(addresses))
            case Expect(tag=tag):
                self._landings[tag] = _Landing(command, self._most_parts, self._parts)
                self.reports.append(Expecting(self._link.number, tag))
            case ExpectMore(tag=tag, block_ids=block_ids):
                if tag in self._landings:
                    self._landings[tag].grow(block_ids)
                self.reports.append(Expecting(self._link.number, tag))
            case Forget(tag=tag):
                self._forget(tag)
            case CloseLink():
                self.close()
                self.reports.append(LinkClosed(self._link.number))
            case _:
                self._link.mark_broken(f"{type(command).__name__} is not for the receiving side")

    def _connect(self, addresses: tuple[bytes, ...]) -> None:
        maps = group_maps(self._heads, len(addresses), self._ranks)
        mine = [[piece for piece in pieces if piece.target == self._rank] for pieces in maps]
        self._most_parts = mine[0][0].most_parts
        for group, pieces in enumerate(mine):
            held = len(heads_of(self._rank, self._ranks, self._heads[group]))
            head_bytes = self._region.group_bytes(group) // held
            base, stride = self._region.line(group)
            self._runs.append(
                [_Run(base + piece.target_head * head_bytes, stride, piece.heads * head_bytes) for piece in pieces]
            )
        sources = sorted({piece.source for pieces in mine for piece in pieces})
        self._link.transport_link.connect([addresses[source] for source in sources])

    def _parts(self, block_ids: Sequence[int]) -> int:
        if len(self._runs) == 1:
            return len(block_ids) * self._most_parts
        return sum(len(self._runs[self._region.group_of(block_id)]) for block_id in block_ids)

    def _forget(self, tag: int) -> None:
        landing = self._landings.get(tag)
        in_flight = () if landing is None else landing.in_flight
        if landing is not None:
            landing.forgotten = True
            if not in_flight:
                del self._landings[tag]
        self.reports.append(Forgotten(self._link.number, tag, in_flight))

    def turn(self) -> bool:
        """Lets data move. Returns whether any did."""
        return self._link.turn(self._poll_link)

    def _poll_link(self) -> bool:
        link = self._link.transport_link
        moved = link.progress()
        landed = link.landed()
        if landed:
            self._link.moved()
        for tag, pieces in itertools.groupby(landed, lambda piece: tag_of(piece.label)):
            self._landed(self._landings[tag], tuple(pieces))
        arrivals = link.arrivals()
        if arrivals:
            link.receive(self._places(arrivals))
        return moved or bool(arrivals)

    def _places(self, arrivals: Sequence[ArrivedMessage]) -> list[int]:
        places = [self._place(arrival) for arrival in arrivals]
        dropped = places.count(DISCARD)
        self._in_flight += len(places) - dropped
        if dropped:
            self.reports.append(Dropped(self._link.number, dropped))
        return places

    def _place(self, arrival: ArrivedMessage) -> int:
        if arrival.length > MAX_PIECE_BYTES:
            raise PeerLost(f"the prefill engine sent a block of {arrival.length} bytes")
        landing = self._landings.get(tag_of(arrival.label))
        if landing is None:
            return DISCARD
        at = landing.awaited(index_of(arrival.label))
        if at < 0:
            return DISCARD
        block, part = divmod(at, landing.most_parts)
        block_id = landing.block_ids[block]
        runs = self._runs[0] if len(self._runs) == 1 else self._runs[self._region.group_of(block_id)]
        if part >= len(runs) or arrival.length != runs[part].length:
            return DISCARD
        landing.accept(at, block_id)
        return runs[part].base + block_id * runs[part].stride

    def _landed(self, landing: _Landing, pieces: tuple[MovedMessage, ...]) -> None:
        self._in_flight -= len(pieces)
        expect, number = landing.expect, self._link.number
        indexes = tuple(index_of(piece.label) for piece in pieces)
        released = [block_id for index in indexes if (block_id := landing.landed(index)) is not None]
        if landing.forgotten:
            if released:
                self.reports.append(Released(number, expect.tag, tuple(released)))
            if not landing.in_flight:
                del self._landings[expect.tag]
            return
        digests = tuple(self._digest(piece) for piece in pieces) if expect.digests else ()
        size = sum(piece.length for piece in pieces)
        self.reports.append(PiecesLanded(number, expect.tag, indexes, digests, size))
        if landing.complete:
            del self._landings[expect.tag]

    def _digest(self, piece: MovedMessage) -> int:
        if piece.digest is not None:
            return piece.digest
        return digest(self._region.bytes_at(piece.place, piece.length), piece.label)

    def moving(self) -> bool:
        return bool(self._in_flight)

    def arm(self) -> bool:
        return self._link.arm()

    def fileno(self) -> int:
        return self._link.transport_link.fileno()

    def close(self) -> None:
        """Closes the link. Nothing is written from then on. Idempotent."""
        self._link.close()
        self._in_flight = 0
        self._landings.clear()
