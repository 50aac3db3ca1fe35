"""Rank 0's transfer thread ↔ the transfer threads of its node's other TP ranks, over private ZMQ PAIR sockets (ipc).

A channel of its own, apart from the forward pass. Rank 0 alone speaks to other nodes' control channels; each rank moves
its own part of the KV cache. A *link* is one rank's connection to all ranks of one other engine; rank 0 numbers them.
Blocks keep one number on all ranks.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from pdserve.wire.transfer import TransferTag

BlockIds: TypeAlias = tuple[int, ...]
Address: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=65_536)]


class _RankMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    link: int


# ---------------------------------------------------------------- rank 0 → rank


class OpenLink(_RankMessage, frozen=True, tag="open"):
    """Answered with ``LinkOpened``."""


class ConnectLink(_RankMessage, frozen=True, tag="connect"):
    addresses: tuple[Address, ...]
    """Of every rank of the other engine, in rank order."""


class CloseLink(_RankMessage, frozen=True, tag="close"):
    """Answered with ``LinkClosed``; from then on the link touches no memory."""


class Expect(_RankMessage, frozen=True, tag="expect"):
    """On a decode node: let these blocks land. Answered with ``Expecting``."""

    tag: TransferTag
    first_block: int
    block_ids: BlockIds
    digests: bool
    paced: bool = False
    """Whether ``ExpectMore`` follows, as long as it is not forgotten."""


class ExpectMore(_RankMessage, frozen=True, tag="expect_more"):
    """Of a paced transfer, let its next blocks land, too. Answered with ``Expecting``."""

    tag: TransferTag
    block_ids: BlockIds


class Forget(_RankMessage, frozen=True, tag="forget"):
    """Accept no more of a transfer. Answered with ``Forgotten``."""

    tag: TransferTag


class SendBlocks(_RankMessage, frozen=True, tag="send"):
    """On a prefill node: send these final blocks, ``first_block`` and after of the prompt."""

    tag: TransferTag
    first_block: int
    block_ids: BlockIds
    digests: bool


class LeaveRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="leave"):
    """Close everything and end the thread."""


LinkCommand: TypeAlias = ConnectLink | CloseLink | Expect | ExpectMore | Forget | SendBlocks
RankCommand: TypeAlias = OpenLink | LinkCommand | LeaveRank

# ---------------------------------------------------------------- rank → rank 0


class LinkOpened(_RankMessage, frozen=True, tag="opened"):
    address: Address


class LinkBroken(_RankMessage, frozen=True, tag="broken"):
    """It moves nothing any more, and is to be closed."""

    reason: str


class LinkClosed(_RankMessage, frozen=True, tag="closed"):
    pass


class Expecting(_RankMessage, frozen=True, tag="expecting"):
    tag: TransferTag


class PiecesLanded(_RankMessage, frozen=True, tag="landed"):
    tag: TransferTag
    indexes: tuple[int, ...]
    """As they travelled: ``head_map.Piece.slot``."""
    digests: tuple[int, ...]
    """One for each; none if none are wanted."""
    size: int
    """Bytes, of all."""


class Forgotten(_RankMessage, frozen=True, tag="forgotten"):
    tag: TransferTag
    in_flight: BlockIds
    """Blocks that may still be written to, until ``Released`` names them."""


class Released(_RankMessage, frozen=True, tag="released"):
    tag: TransferTag
    block_ids: BlockIds


class Dropped(_RankMessage, frozen=True, tag="dropped"):
    """Pieces that belonged to nothing were received into scratch memory."""

    count: int


class PiecesSent(_RankMessage, frozen=True, tag="sent"):
    tag: TransferTag
    count: int
    size: int
    """Bytes, of all."""


class PiecesAnnounced(_RankMessage, frozen=True, tag="announced"):
    """What this rank sends to ``target``, one digest a block."""

    tag: TransferTag
    target: int
    first_block: int
    digests: tuple[int, ...]


RankReport: TypeAlias = (
    LinkOpened
    | LinkBroken
    | LinkClosed
    | Expecting
    | PiecesLanded
    | Forgotten
    | Released
    | Dropped
    | PiecesSent
    | PiecesAnnounced
)
