"""One prefill rank's end of the link to one decode engine. It sends its heads of each block to the decode ranks.

Commands and reports are those of ``pdserve.wire.rank``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

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
from pdserve_kvtransfer.pieces import Piece, digest, group_maps, heads_of, label_of, tag_of
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

    def __init__(self, command: SendBlocks, targets: int) -> None:
        self.command = command
        self.posted = 0
        blocks = len(command.block_ids) if command.digests else 0
        self.digests: list[list[int]] = [[0] * blocks for _ in range(targets)]
        """The digests of the pieces for each target, one for each block; 0 where there is none."""

    @property
    def complete(self) -> bool:
        return self.posted == len(self.command.block_ids)


class PushPort:
    """A ``ranks.Port`` for ``Direction.PUSH``."""

    def __init__(
        self, link: int, rank: int, ranks: int, heads: Sequence[int], region: KvRegion, transport: Transport
    ) -> None:
        """Opens the link. ``heads`` are those of each group. Raises TransferError if the transport cannot."""
        self._link = RankLink(link, transport, region.memory)
        self._rank, self._ranks, self._heads = rank, ranks, heads
        self._region = region
        self._head_bytes = [
            region.group_bytes(group) // len(heads_of(rank, ranks, count)) for group, count in enumerate(heads)
        ]
        self._blocks_a_turn = min(_BLOCKS_A_TURN, max(1, _BYTES_A_TURN // region.block_bytes))
        self._pieces: list[list[Piece]] = []
        """The pieces of a block of each group that this rank sends."""
        self._targets: list[int] = []
        """The ranks that get any of them, in the order of the transport's connections."""
        self._unposted: dict[int, deque[_PostProgress]] = {}
        self._in_flight = 0

    @property
    def reports(self) -> list[RankReport]:
        return self._link.reports

    def handle(self, command: LinkCommand) -> None:
        match command:
            case SendBlocks():
                if not self._link.broken and command.block_ids:
                    self._unposted.setdefault(command.tag, deque()).append(_PostProgress(command, len(self._targets)))
            case ConnectLink(addresses=addresses):
                self._link.attempt(lambda: self._connect(addresses))
            case CloseLink():
                self.close()
                self.reports.append(LinkClosed(self._link.number))
            case _:
                self._link.mark_broken(f"{type(command).__name__} is not for the sending side")

    def _connect(self, addresses: tuple[bytes, ...]) -> None:
        maps = group_maps(self._heads, self._ranks, len(addresses))
        self._pieces = [[piece for piece in pieces if piece.source == self._rank] for pieces in maps]
        self._targets = sorted({piece.target for pieces in self._pieces for piece in pieces})
        self._link.transport_link.connect([addresses[target] for target in self._targets])

    def _post(self) -> bool:
        """Posts some blocks of the transfer whose turn it is, if UCX can have more at once. Returns whether it did."""
        if not self._unposted or self._in_flight >= IN_FLIGHT:
            return False
        tag = next(iter(self._unposted))
        # If this transfer has more blocks, the others have their turns first.
        queue = self._unposted.pop(tag)
        progress = queue[0]
        end = self._end_of_turn(progress)
        for group, places in self._by_group(progress, end):
            for piece in self._pieces[group]:
                self._post_pieces(progress, group, places, piece)
        progress.posted = end
        if progress.complete:
            queue.popleft()
            self._announce(progress)
        if queue:
            self._unposted[tag] = queue
        return True

    def _end_of_turn(self, progress: _PostProgress) -> int:
        """Returns the end of the command's blocks that are posted now."""
        block_ids, region = progress.command.block_ids, self._region
        end = min(progress.posted + _BLOCKS_A_TURN, len(block_ids))
        if len(self._pieces) == 1:
            return min(progress.posted + self._blocks_a_turn, end)
        left = _BYTES_A_TURN - region.group_bytes(region.group_of(block_ids[progress.posted]))
        for place in range(progress.posted + 1, end):
            left -= region.group_bytes(region.group_of(block_ids[place]))
            if left < 0:
                return place
        return end

    def _by_group(self, progress: _PostProgress, end: int) -> Iterable[tuple[int, Sequence[int]]]:
        """Returns the groups of the command's next blocks, each with the places of its blocks in the command."""
        places = range(progress.posted, end)
        if len(self._pieces) == 1:
            return ((0, places),)
        found: dict[int, list[int]] = {}
        for place in places:
            found.setdefault(self._region.group_of(progress.command.block_ids[place]), []).append(place)
        return found.items()

    def _post_pieces(self, progress: _PostProgress, group: int, blocks: Sequence[int], piece: Piece) -> None:
        """Posts this piece of blocks of one group. ``blocks`` are their places in the command."""
        command, head_bytes = progress.command, self._head_bytes[group]
        base, stride = self._region.line(group)
        base, length = base + piece.source_head * head_bytes, piece.heads * head_bytes
        block_ids, tag, number = command.block_ids, command.tag, command.first_block
        places = [base + block_ids[block] * stride for block in blocks]
        labels = [label_of(tag, piece.index(number + block)) for block in blocks]
        to = self._targets.index(piece.target)
        self._link.transport_link.send(places, length, labels, to)
        self._in_flight += len(places)
        if command.digests:
            digests, bytes_at = progress.digests[to], self._region.bytes_at
            for block, place, label in zip(blocks, places, labels, strict=True):
                digests[block] = digest(bytes_at(place, length), label)

    def _announce(self, progress: _PostProgress) -> None:
        command = progress.command
        for target, digests in zip(self._targets, progress.digests, strict=True):
            if any(digests):
                self.reports.append(
                    PiecesAnnounced(self._link.number, command.tag, target, command.first_block, tuple(digests))
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
