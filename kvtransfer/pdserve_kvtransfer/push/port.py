"""One prefill rank's end of the link to one decode engine. It sends its heads of each block to the decode ranks.

Commands and reports are those of ``pdserve.wire.rank``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from pdserve.wire.rank import (
    CloseLink,
    ConnectLink,
    LinkClosed,
    LinkCommand,
    PiecesAnnounced,
    PiecesSent,
    RankReport,
    SendBlocks,
)
from pdserve_kvtransfer.pieces import Piece, digest, head_map, heads_of, label_of, tag_of
from pdserve_kvtransfer.ranks import RankLink
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import DISCARD, MovedMessage, Transport

IN_FLIGHT = 64
"""How many pieces UCX has at once: enough to keep any transport busy, and few enough to check in every turn."""
_BLOCKS_A_TURN = 32
_BYTES_A_TURN = 2**21
"""So much is posted between two polls of the link, so that data moves while the next blocks' digests are computed."""


class _PostProgress:
    """How much of one ``SendBlocks`` is posted."""

    def __init__(self, command: SendBlocks, pieces: int) -> None:
        self.command = command
        self.posted = 0
        self.digests: list[list[int]] = [[] for _ in range(pieces)]

    @property
    def complete(self) -> bool:
        return self.posted == len(self.command.block_ids)


class PushPort:
    """A ``ranks.Port`` for ``Direction.PUSH``."""

    def __init__(self, link: int, rank: int, ranks: int, kv_heads: int, region: KvRegion, transport: Transport) -> None:
        """Opens the link. Raises TransferError if the transport cannot."""
        self._link = RankLink(link, transport, region.memory)
        self._rank, self._ranks, self._kv_heads = rank, ranks, kv_heads
        self._region = region
        self._head_bytes = region.block_bytes // len(heads_of(rank, ranks, kv_heads))
        self._blocks_a_turn = min(_BLOCKS_A_TURN, max(1, _BYTES_A_TURN // region.block_bytes))
        self._pieces: list[Piece] = []
        self._unposted: dict[int, deque[_PostProgress]] = {}
        self._in_flight = 0

    @property
    def reports(self) -> list[RankReport]:
        return self._link.reports

    def handle(self, command: LinkCommand) -> None:
        match command:
            case SendBlocks():
                if not self._link.broken and command.block_ids:
                    self._unposted.setdefault(command.tag, deque()).append(_PostProgress(command, len(self._pieces)))
            case ConnectLink(addresses=addresses):
                self._link.attempt(lambda: self._connect(addresses))
            case CloseLink():
                self.close()
                self.reports.append(LinkClosed(self._link.number))
            case _:
                self._link.mark_broken(f"{type(command).__name__} is not for the sending side")

    def _connect(self, addresses: tuple[bytes, ...]) -> None:
        pieces = head_map(self._kv_heads, self._ranks, len(addresses))
        self._pieces = [piece for piece in pieces if piece.source == self._rank]
        self._link.transport_link.connect([addresses[piece.target] for piece in self._pieces])

    def _post(self) -> bool:
        """Posts some blocks of the transfer whose turn it is, if UCX can have more at once. Returns whether it did."""
        if not self._unposted or self._in_flight >= IN_FLIGHT:
            return False
        tag = next(iter(self._unposted))
        # If this transfer has more blocks, the others have their turns first.
        queue = self._unposted.pop(tag)
        progress = queue[0]
        end = min(progress.posted + self._blocks_a_turn, len(progress.command.block_ids))
        for to, piece in enumerate(self._pieces):
            self._post_pieces(progress, end, piece, to)
        progress.posted = end
        if progress.complete:
            queue.popleft()
            self._announce(progress)
        if queue:
            self._unposted[tag] = queue
        return True

    def _post_pieces(self, progress: _PostProgress, end: int, piece: Piece, to: int) -> None:
        command, region = progress.command, self._region
        first, length = piece.source_head * self._head_bytes, piece.heads * self._head_bytes
        places = [region.place(block_id, first) for block_id in command.block_ids[progress.posted : end]]
        blocks = range(command.first_block + progress.posted, command.first_block + end)
        labels = [label_of(command.tag, piece.index(block)) for block in blocks]
        self._link.transport_link.send(places, length, labels, to)
        self._in_flight += len(places)
        if command.digests:
            pieces = zip(places, labels, strict=True)
            progress.digests[to] += [digest(region.bytes_at(place, length), label) for place, label in pieces]

    def _announce(self, progress: _PostProgress) -> None:
        command = progress.command
        for piece, digests in zip(self._pieces, progress.digests, strict=True):
            if digests:
                self.reports.append(
                    PiecesAnnounced(self._link.number, command.tag, piece.target, command.first_block, tuple(digests))
                )

    def turn(self) -> bool:
        """Lets data move. Returns whether any did."""
        return self._link.turn(self._poll_link)

    def _poll_link(self) -> bool:
        link = self._link.transport_link
        moved = link.progress()
        sent = link.sent()
        if sent:
            self._link.moved()
            self._complete(sent)
        arrivals = link.arrivals()
        if arrivals:
            # No message is expected here, but one must not stay in the queue for ever either.
            link.receive([DISCARD] * len(arrivals))
        return self._post() or moved

    def _complete(self, sent: Sequence[MovedMessage]) -> None:
        for tag, messages in itertools.groupby(sent, lambda message: tag_of(message.label)):
            sizes = [message.length for message in messages]
            self._in_flight -= len(sizes)
            self.reports.append(PiecesSent(self._link.number, tag, len(sizes), sum(sizes)))

    def moving(self) -> bool:
        return bool(self._in_flight) or bool(self._unposted)

    def arm(self) -> bool:
        nothing_to_post = not self._unposted or self._in_flight >= IN_FLIGHT
        return nothing_to_post and self._link.arm()

    def fileno(self) -> int:
        return self._link.transport_link.fileno()

    def close(self) -> None:
        """Closes the link. Nothing is read from then on. Idempotent."""
        self._link.close()
        self._unposted.clear()
        self._in_flight = 0
