"""One prefill rank's end of the link to one decode engine: its heads of each block, to the decode ranks that need them.

Commands and reports are those of ``pdserve.wire.rank_transfer``.
"""

from __future__ import annotations

from collections import deque

import msgspec

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.rank_transfer import (
    CloseLink,
    ConnectLink,
    LinkCommand,
    PiecesAnnounced,
    PiecesSent,
    RankReport,
    SendBlocks,
)
from pdserve_kvtransfer.digest import digest
from pdserve_kvtransfer.head_map import Piece, head_map, heads_of
from pdserve_kvtransfer.in_flight import InFlight
from pdserve_kvtransfer.port_link import PortLink
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import Completion, Transport

IN_FLIGHT = 64
"""Pieces that UCX has at once: enough to keep any transport busy, and few enough to look at in every turn."""
_BLOCKS_A_TURN = 32
_BYTES_A_TURN = 2**19
"""Posted between two looks at the link, so that data moves while the next blocks' digests are computed."""


class _Sending(msgspec.Struct, frozen=True, gc=False):
    completion: Completion
    tag: int
    size: int

    def done(self) -> bool:
        return self.completion.done()


class _Order:
    """What is left to post of one ``SendBlocks``."""

    def __init__(self, command: SendBlocks, pieces: int) -> None:
        self.command = command
        self.posted = 0
        self.digests: list[list[int]] = [[] for _ in range(pieces)]

    @property
    def complete(self) -> bool:
        return self.posted == len(self.command.block_ids)


class SendPort:
    """``reports`` collects what rank 0 is to be told; whoever drives the port empties it."""

    def __init__(self, link: int, rank: int, ranks: int, kv_heads: int, region: KvRegion, transport: Transport) -> None:
        """Raises TransferError if the transport cannot open a link."""
        self._port = PortLink(link, transport)
        self._rank, self._ranks, self._kv_heads = rank, ranks, kv_heads
        self._region = region
        self._head_bytes = region.block_bytes // len(heads_of(rank, ranks, kv_heads))
        self._blocks_a_turn = min(_BLOCKS_A_TURN, max(1, _BYTES_A_TURN // region.block_bytes))
        self._pieces: list[Piece] = []
        self._orders: deque[_Order] = deque()
        self._sending: InFlight[_Sending] = InFlight()

    @property
    def reports(self) -> list[RankReport]:
        return self._port.reports

    def handle(self, command: LinkCommand) -> None:
        match command:
            case ConnectLink(addresses=addresses):
                self._connect(addresses)
            case SendBlocks():
                self._send(command)
            case CloseLink():
                self.close()
                self._port.report_closed()
            case _:
                raise TypeError(f"{type(command).__name__} is not for the sending side")

    def _connect(self, addresses: tuple[bytes, ...]) -> None:
        pieces = head_map(self._kv_heads, self._ranks, len(addresses))
        self._pieces = [piece for piece in pieces if piece.source == self._rank]
        try:
            self._port.link.connect([addresses[piece.target] for piece in self._pieces])
        except TransferError as exc:
            self._port.found_broken(str(exc))

    def _send(self, command: SendBlocks) -> None:
        if not self._port.broken:
            self._orders.append(_Order(command, len(self._pieces)))

    def _post(self) -> bool:
        """The next few blocks, if there is room. True if there were any."""
        if not self._orders or len(self._sending) >= IN_FLIGHT:
            return False
        order = self._orders[0]
        end = min(order.posted + self._blocks_a_turn, len(order.command.block_ids))
        for to, piece in enumerate(self._pieces):
            self._post_pieces(order, end, piece, to)
        order.posted = end
        if order.complete:
            self._orders.popleft()
            self._announce(order)
        return True

    def _post_pieces(self, order: _Order, end: int, piece: Piece, to: int) -> None:
        command, digests = order.command, order.digests[to]
        first, length = piece.source_head * self._head_bytes, piece.heads * self._head_bytes
        for at in range(order.posted, end):
            index = (command.first_block + at) * piece.slots + piece.slot
            memory = self._region.part(command.block_ids[at], first, length)
            completion = self._port.link.send(memory, command.tag, index, to)
            self._sending.add(_Sending(completion, command.tag, length))
            if command.digests:
                digests.append(digest(memory, command.tag, index))

    def _announce(self, order: _Order) -> None:
        command = order.command
        for piece, digests in zip(self._pieces, order.digests, strict=True):
            if digests:
                self.reports.append(
                    PiecesAnnounced(self._port.number, command.tag, piece.target, command.first_block, tuple(digests))
                )

    def turn(self) -> bool:
        """Let data move. True if any did."""
        if self._port.broken:
            return False
        try:
            moved = self._port.link.progress()
            if self._sending:
                self._complete()
            moved |= self._post()
            if self._port.link.broken():
                raise PeerLost("the connection that carries KV blocks broke")
        except PeerLost as exc:
            self._port.found_broken(str(exc))
            return False
        return moved

    def _complete(self) -> None:
        sent: dict[int, list[int]] = {}
        for sending in self._sending.take_done():
            if sending.completion.failed():
                raise PeerLost("a KV block could not be sent")
            sent.setdefault(sending.tag, []).append(sending.size)
        for tag, sizes in sent.items():
            self.reports.append(PiecesSent(self._port.number, tag, len(sizes), sum(sizes)))

    def moving(self) -> bool:
        return bool(self._sending) or bool(self._orders)

    def arm(self) -> bool:
        waits_for_room = not self._orders or len(self._sending) >= IN_FLIGHT
        return waits_for_room and self._sending.settled() and self._port.arm()

    def fileno(self) -> int:
        return self._port.link.fileno()

    def close(self) -> None:
        """Idempotent. Nothing is read afterwards."""
        self._port.close()
        self._orders.clear()
        self._sending.clear()
