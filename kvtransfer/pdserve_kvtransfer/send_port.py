"""One prefill rank's end of the link to one decode engine: its heads of each block, to the decode ranks that need them.

Commands and reports are those of ``pdserve.wire.rank_transfer``.
"""

from __future__ import annotations

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


class _Sending(msgspec.Struct, frozen=True, gc=False):
    completion: Completion
    tag: int
    size: int

    def done(self) -> bool:
        return self.completion.done()


class SendPort:
    """``reports`` collects what rank 0 is to be told; whoever drives the port empties it."""

    def __init__(self, link: int, rank: int, ranks: int, kv_heads: int, region: KvRegion, transport: Transport) -> None:
        """Raises TransferError if the transport cannot open a link."""
        self._port = PortLink(link, transport)
        self._rank, self._ranks, self._kv_heads = rank, ranks, kv_heads
        self._region = region
        self._head_bytes = region.block_bytes // len(heads_of(rank, ranks, kv_heads))
        self._pieces: list[Piece] = []
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
        if self._port.broken:
            return
        try:
            for to, piece in enumerate(self._pieces):
                self._send_piece(command, piece, to)
        except PeerLost as exc:
            self._port.found_broken(str(exc))

    def _send_piece(self, command: SendBlocks, piece: Piece, to: int) -> None:
        first, length = piece.source_head * self._head_bytes, piece.heads * self._head_bytes
        part, send, add, tag = self._region.part, self._port.link.send, self._sending.add, command.tag
        digests = []
        for block, block_id in enumerate(command.block_ids, command.first_block):
            index = block * piece.slots + piece.slot
            memory = part(block_id, first, length)
            add(_Sending(send(memory, tag, index, to), tag, length))
            if command.digests:
                digests.append(digest(memory, tag, index))
        if digests:
            announced = PiecesAnnounced(
                self._port.number, command.tag, piece.target, command.first_block, tuple(digests)
            )
            self.reports.append(announced)

    def turn(self) -> bool:
        """Let data move. True if any did."""
        if self._port.broken:
            return False
        try:
            moved = self._port.link.progress()
            if self._sending:
                self._complete()
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
        return bool(self._sending)

    def arm(self) -> bool:
        return self._sending.settled() and self._port.arm()

    def fileno(self) -> int:
        return self._port.link.fileno()

    def close(self) -> None:
        """Idempotent. Nothing is read afterwards."""
        self._port.close()
        self._sending.clear()
