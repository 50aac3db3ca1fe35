"""The decode side of one transfer, without I/O. Every input returns the messages to send and the events to queue.

QUEUED ─▶ PREPARING ─▶ MOVING ─▶ ENDED                   all pieces landed, on all ranks
QUEUED ─▶ ENDED                                          over before anybody was told
PREPARING, MOVING ─▶ FORGETTING ─▶ ENDED                 failed or cancelled, or the holder has a part of the blocks
                     FORGETTING ─▶ DRAINING ─▶ ENDED     and something was still being written
(any)  ─▶ ENDED                                          the link is closed

An ``Aggregator`` turns many ranks' pieces of many blocks into one completion. Reports may come in any order, twice, or
for pieces that are not expected; only a piece that has landed, and whose digest is the announced one, counts, and it
counts once.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import TypeAlias

from pdserve.wire.rank import Expect, ExpectMore, Forget
from pdserve.wire.transfer import (
    Accept,
    BlocksReady,
    CachedRequest,
    Cancel,
    Digests,
    Done,
    Failed,
    FirstToken,
    Held,
    PrefillRequest,
)
from pdserve_kvtransfer.events import (
    KIND_OF_CAUSE,
    BlocksComing,
    BlocksLanded,
    BlocksReleased,
    CachedFetchOrder,
    FailureKind,
    FetchCancelled,
    FetchEnd,
    FetchEvent,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
)
from pdserve_kvtransfer.pieces import Piece

FetchMessage: TypeAlias = Expect | ExpectMore | Forget | PrefillRequest | CachedRequest | Accept | Done | Cancel
"""What goes to ranks or to the other engine."""
FetchEffect: TypeAlias = FetchMessage | FetchEvent


class FetchState(enum.Enum):
    QUEUED = "queued"
    """The handshake is not complete, so no rank and no other engine knows of this transfer."""
    PREPARING = "preparing"
    """The ranks of this node have not all confirmed that they let its blocks land."""
    MOVING = "moving"
    FORGETTING = "forgetting"
    """Its end is settled. It is reported when every rank has said which blocks are still being written."""
    DRAINING = "draining"
    """Its end was reported, but accepted receives still write to some blocks, which are quarantined."""
    ENDED = "ended"


class FetchSession:
    """One fetch, from its order to its one terminal event, and on until nothing writes to its blocks.

    With ``checked``, a piece counts only when its digest is the one that the prefill engine announced.
    """

    def __init__(
        self,
        order: FetchOrder | CachedFetchOrder,
        tag: int,
        link: int,
        groups: bytes,
        block_bytes: Sequence[int],
        now: float,
        *,
        checked: bool,
    ) -> None:
        """``link`` is the link's number on the ranks. ``groups`` has the group of each wanted block, and
        ``block_bytes`` the size of a block of each group on all ranks together.
        """
        self.order = order
        self.tag = tag
        self.state = FetchState.QUEUED
        self.deadline = now + order.deadline_s
        self.all_sent: float | None = None
        """When the prefill engine had sent its last block, or had said how many it has. None before."""
        self._tail_bytes = 0
        self._link = link
        self.accepted_at = now
        """When the engine gave a paced fetch its last destinations."""
        self._block_bytes = block_bytes
        self._groups = groups
        """The group of each block that is awaited: of the wanted ones, or of those of them that a holder has."""
        self._started = now
        self._checked = checked
        self._ranks = 0
        self._pieces: list[dict[tuple[int, int], Piece]] = []
        self._cached = isinstance(order, CachedFetchOrder)
        self._landings = Aggregator(0, b"", (), checked=checked)
        self._waiting_for: set[int] = set()
        self._end: FetchEnd | None = None
        self._in_flight: dict[int, set[int]] = {}
        self._block_ids = list(order.block_ids)
        self._coming = self._leading = self._usable = 0
        self._accepts: list[int] = []
        self._expecting: dict[int, int] = {}

    def __str__(self) -> str:
        return f"request_id={self.order.request_id or '-'} transfer={self.order.transfer_id}"

    @property
    def outstanding(self) -> bool:
        """Whether blocks that may be sent have not landed."""
        return not self.order.paced_blocks or self._leading < min(len(self._block_ids), self._coming)

    @property
    def over(self) -> bool:
        """Whether the fetch's end is settled."""
        return self.state in (FetchState.FORGETTING, FetchState.DRAINING, FetchState.ENDED)

    # ------------------------------------------------------------ towards the prefill engine

    def prepare(self, pieces: Sequence[Sequence[Piece]], ranks: int) -> list[FetchEffect]:
        """The handshake is complete. ``pieces`` says for each group which rank gets which heads from which rank."""
        if self.state is not FetchState.QUEUED:
            return []
        self.state = FetchState.PREPARING
        self._ranks = ranks
        self._waiting_for = set(range(ranks))
        self._pieces = [{(piece.source, piece.target): piece for piece in of_group} for of_group in pieces]
        parts = [
            [max(piece.parts for piece in of_group if piece.target == rank) for rank in range(ranks)]
            for of_group in pieces
        ]
        order = self.order
        self._landings = Aggregator(order.first_block, self._groups, parts, checked=self._checked, exact=self._cached)
        paced = bool(order.paced_blocks)
        return [Expect(self._link, self.tag, order.first_block, order.block_ids, self._checked, paced)]

    def expecting(self, rank: int, now: float) -> list[FetchEffect]:
        """A rank has confirmed that it lets the blocks land."""
        if self.state is FetchState.MOVING:
            return self._accept_expected(rank)
        if self.state is not FetchState.PREPARING:
            # The ranks that are waited for now are those that have not forgotten the transfer.
            return []
        self._waiting_for.discard(rank)
        if self._waiting_for:
            return []
        self.state = FetchState.MOVING
        order = self.order
        accepted = order.first_block + len(order.block_ids)
        accept: list[FetchEffect] = (
            [Accept(order.transfer_id, accepted)] if order.paced_blocks and order.block_ids else []
        )
        return [self._request(max(self.deadline - now, 0.001)), *accept]

    def _request(self, deadline_s: float) -> PrefillRequest | CachedRequest:
        order = self.order
        if isinstance(order, CachedFetchOrder):
            return CachedRequest(
                transfer_id=order.transfer_id,
                tag=self.tag,
                hashes=order.hashes,
                deadline_s=deadline_s,
                digests=self._checked,
                paced=bool(order.paced_blocks),
                request_id=order.request_id,
            )
        return PrefillRequest(
            transfer_id=order.transfer_id,
            tag=self.tag,
            token_ids=order.token_ids,
            first_block=order.first_block,
            sampling=order.sampling,
            deadline_s=deadline_s,
            child_seeds=order.child_seeds,
            digests=self._checked,
            paced=bool(order.paced_blocks),
            terms=order.terms,
        )

    def accept(self, block_ids: tuple[int, ...], now: float) -> list[FetchEffect]:
        """The engine has destinations for the next blocks of a paced fetch."""
        if self.state is not FetchState.MOVING:
            return []
        self._block_ids += block_ids
        self.accepted_at = now
        self._accepts.append(self.order.first_block + len(self._block_ids))
        return [ExpectMore(self._link, self.tag, block_ids)]

    def _accept_expected(self, rank: int) -> list[FetchEffect]:
        """A rank has confirmed that it lets the next blocks land. When all ranks have, the blocks may be sent."""
        before = min(self._expecting.get(rank, 0) for rank in range(self._ranks))
        self._expecting[rank] = self._expecting.get(rank, 0) + 1
        ready = min(self._expecting.get(rank, 0) for rank in range(self._ranks))
        return (
            [Accept(self.order.transfer_id, self._accepts[ready - 1])] if before < ready <= len(self._accepts) else []
        )

    def on_ready(self, message: BlocksReady) -> list[FetchEffect]:
        """The prefill engine has more blocks to send."""
        coming = min(message.end_block - self.order.first_block, self.order.paced_blocks)
        if self.state is not FetchState.MOVING or coming <= self._coming:
            return []
        if coming > len(self._groups):
            return self._fail(FailureKind.CORRUPT, f"a holder of {len(self._groups)} blocks sends {coming}", tell=True)
        self._coming = coming
        return [BlocksComing(self.order.transfer_id, coming)]

    # ------------------------------------------------------------ arrivals

    def landed(self, rank: int, indexes: Sequence[int], digests: Sequence[int], now: float) -> list[FetchEffect]:
        """A rank has received pieces. ``digests`` has one for each, or none if pieces are not checked."""
        if self.state is not FetchState.MOVING:
            return []
        for index, digest in zip(indexes, digests or itertools.repeat(0, len(indexes)), strict=True):
            if self._landings.landed(rank, index, digest) is PieceCheck.CORRUPT:
                return self._fail(FailureKind.CORRUPT, f"piece {index} on rank {rank} is not what was sent", tell=True)
        return self._finish_if_complete(now)

    def on_digests(self, message: Digests, now: float) -> list[FetchEffect]:
        if self.state is not FetchState.MOVING:
            return []
        pieces = [of_group.get((message.source, message.target)) for of_group in self._pieces]
        for block, digest in enumerate(message.digests, message.first_block):
            piece, check = pieces[self._group_of(block)], PieceCheck.CORRUPT
            if piece is not None:
                check = self._landings.announced(message.target, piece.index(block), digest)
            elif not digest and len(pieces) > 1:
                check = PieceCheck.IGNORED
            if check is PieceCheck.CORRUPT:
                return self._fail(FailureKind.CORRUPT, f"block {block} is not what was sent", tell=True)
        return self._finish_if_complete(now)

    def on_first_token(self, message: FirstToken, now: float) -> list[FetchEffect]:
        if self.state is not FetchState.MOVING or self.all_sent is not None:
            return []
        if self._cached:
            return self._fail(FailureKind.CORRUPT, "cached blocks were asked for, and a first token came", tell=True)
        arrived = FirstTokenArrived(
            self.order.transfer_id, message.tokens, message.cached_tokens, message.load, message.prompt_logprobs
        )
        return [arrived, *self._note_all_sent(now)]

    def on_held(self, message: Held, now: float) -> list[FetchEffect]:
        """The holder has said how many of the wanted blocks it has."""
        if self.state is not FetchState.MOVING or self.all_sent is not None:
            return []
        order, count, wanted = self.order, message.count, self.order.num_blocks
        if isinstance(order, CachedFetchOrder) and len(self._pieces) > 1:
            # Of a model with groups all or nothing is sent.
            count = {len(order.hashes): wanted, 0: 0}.get(count, -1)
            self._usable = message.usable
        if not self._cached or not self._coming <= count <= wanted or not self._landings.shorten(count):
            reason = f"{wanted} blocks were asked for, and the answer of {message.count} does not fit what was sent"
            return self._fail(FailureKind.CORRUPT, reason, tell=True)
        self._groups = self._groups[:count]
        return self._note_all_sent(now)

    def _note_all_sent(self, now: float) -> list[FetchEffect]:
        self.all_sent = now
        self._tail_bytes = round(self._landings.share_missing * self._num_bytes)
        return self._finish_if_complete(now)

    @property
    def _num_bytes(self) -> int:
        """The bytes of all awaited blocks on all ranks together."""
        return sum(self._groups.count(group) * size for group, size in enumerate(self._block_bytes))

    def _group_of(self, block: int) -> int:
        """Returns the group of the block with this number; any group if it is not awaited."""
        at = block - self.order.first_block
        return self._groups[at] if 0 <= at < len(self._groups) else 0

    def _finish_if_complete(self, now: float) -> list[FetchEffect]:
        if self.all_sent is None or not self._landings.complete:
            return self._tell_landed()
        transfer_id = self.order.transfer_id
        landed = FetchLanded(
            transfer_id,
            seconds=now - self._started,
            bytes=self._num_bytes,
            tail_s=now - self.all_sent,
            tail_bytes=self._tail_bytes,
            landed=len(self._groups),
            usable=self._usable,
        )
        if len(self._groups) < self.order.num_blocks:
            # The ranks would still let the other blocks land, so the engine gets those back once the ranks do not.
            return [Done(transfer_id), *self._begin_end(landed, tell=False)]
        self.state = FetchState.ENDED
        if self.order.paced_blocks:
            return [Done(transfer_id), Forget(self._link, self.tag), landed]
        return [Done(transfer_id), landed]

    def _tell_landed(self) -> list[FetchEffect]:
        if not self.order.paced_blocks:
            return []
        before, self._leading = self._leading, self._landings.leading_from(self._leading)
        return [BlocksLanded(self.order.transfer_id, self._leading)] if self._leading > before else []

    # ------------------------------------------------------------ endings

    def on_failed(self, message: Failed) -> list[FetchEffect]:
        """The prefill engine has ended the transfer."""
        return self._fail(KIND_OF_CAUSE[message.cause], message.reason, tell=False)

    def expire(self, now: float) -> list[FetchEffect]:
        """The clock has moved."""
        if now < self.deadline:
            return []
        return self._fail(FailureKind.DEADLINE, "deadline: the prompt's KV cache did not arrive in time", tell=True)

    def withdraw(self, kind: FailureKind, reason: str) -> list[FetchEffect]:
        """This side gives the fetch up, although the engine has not cancelled it."""
        return self._fail(kind, reason, tell=True)

    def cancel(self) -> list[FetchEffect]:
        """The engine has cancelled the fetch."""
        return self._begin_end(FetchCancelled(self.order.transfer_id, ()), tell=True)

    def forgotten(self, rank: int, in_flight: Sequence[int]) -> list[FetchEffect]:
        """A rank accepts no more pieces, but is still writing to these blocks."""
        if self.state is not FetchState.FORGETTING or rank not in self._waiting_for:
            return []
        self._waiting_for.discard(rank)
        self._in_flight[rank] = set(in_flight)
        if self._waiting_for:
            return []
        quarantined = self._still_written()
        self.state = FetchState.DRAINING if quarantined else FetchState.ENDED
        return self._report(tuple(block for block in dict.fromkeys(self._block_ids) if block in quarantined))

    def released(self, rank: int, block_ids: Sequence[int]) -> list[FetchEffect]:
        """A rank has finished writing to these blocks."""
        self._in_flight.get(rank, set()).difference_update(block_ids)
        if self.state is not FetchState.DRAINING:
            return []
        still = self._still_written()
        if not still:
            self.state = FetchState.ENDED
        free = tuple(block for block in block_ids if block not in still)
        return [BlocksReleased(free)] if free else []

    def closed(self, kind: FailureKind, reason: str) -> list[FetchEffect]:
        """The link is closed on every rank, so nothing is written any more, and the peer cannot be told."""
        if self.state is FetchState.ENDED:
            return []
        if self.state is FetchState.DRAINING:
            self.state = FetchState.ENDED
            return [BlocksReleased(tuple(self._still_written()))]
        if self._end is None:
            asked = self.state is FetchState.MOVING and self.all_sent is None
            self._end = FetchFailed(self.order.transfer_id, reason, 0, (), kind, asked)
        self.state = FetchState.ENDED
        return self._report(())

    def _fail(self, kind: FailureKind, reason: str, *, tell: bool) -> list[FetchEffect]:
        return self._begin_end(FetchFailed(self.order.transfer_id, reason, 0, (), kind), tell=tell)

    def _begin_end(self, end: FetchEnd, *, tell: bool) -> list[FetchEffect]:
        if self.over:
            return []
        known, self._end = self.state, end
        if known is FetchState.QUEUED:
            self.state = FetchState.ENDED
            return self._report(())
        self.state = FetchState.FORGETTING
        self._waiting_for = set(range(self._ranks))
        cancel: list[FetchEffect] = [Cancel(self.order.transfer_id)] if tell and known is FetchState.MOVING else []
        return [*cancel, Forget(self._link, self.tag)]

    def _report(self, quarantined: tuple[int, ...]) -> list[FetchEffect]:
        match self._end:
            case FetchLanded() if not quarantined:
                return [self._end]
            case FetchLanded(transfer_id, landed=count):
                reason = f"a holder of {count} blocks sends others, too"
                return [FetchFailed(transfer_id, reason, count, quarantined, FailureKind.CORRUPT)]
            case FetchFailed(transfer_id, reason, kind=kind, asked=asked):
                return [FetchFailed(transfer_id, reason, self._landings.leading_blocks, quarantined, kind, asked)]
            case _:
                return [FetchCancelled(self.order.transfer_id, quarantined)]

    def _still_written(self) -> set[int]:
        return set().union(*self._in_flight.values())


class PieceCheck(enum.Enum):
    """The result of comparing a landed piece with what its sender announced."""

    FINE = "fine"
    IGNORED = "ignored"
    """The news was known already, or its piece is not expected."""
    CORRUPT = "corrupt"
    """The piece differs from what was sent, or two announcements contradict each other, or nobody asked for it."""


class Aggregator:
    """The pieces of blocks from ``first_block`` on, whose groups are ``groups``.

    ``parts[group][rank]`` make one block of a group.
    """

    def __init__(
        self, first_block: int, groups: bytes, parts: Sequence[Sequence[int]], *, checked: bool, exact: bool = False
    ) -> None:
        """With ``checked``, a piece counts only if its announced digest is known and equal.

        With ``exact``, a piece of another block is corrupt, instead of ignored.
        """
        self._first_block = first_block
        self._groups, self._parts = groups, parts
        self._most_parts: list[int] = [max(of_rank) for of_rank in zip(*parts, strict=True)]
        totals = [sum(of_group) for of_group in parts]
        self._missing = [totals[group] for group in groups] if len(parts) > 1 else totals * len(groups)
        self._left = self._pieces = sum(self._missing)
        self._gaps = len(parts) > 1
        self._checked = checked
        self._exact = exact
        # Digests by rank and piece. None stands for a digest that is not known yet, or will never be.
        self._announced: list[list[int | None]] = [[None] * (most * len(groups)) for most in self._most_parts]
        self._found: list[list[int | None]] = [[None] * (most * len(groups)) for most in self._most_parts]

    @property
    def complete(self) -> bool:
        return self._left == 0

    @property
    def share_missing(self) -> float:
        """The share of the pieces that have not landed yet: 1 at the start, 0 when complete."""
        return self._left / self._pieces if self._pieces else 0.0

    @property
    def leading_blocks(self) -> int:
        """How many blocks from the first on are complete on every rank."""
        return self.leading_from(0)

    def leading_from(self, blocks: int) -> int:
        """Returns ``leading_blocks``. ``blocks`` of them are known to be complete."""
        while blocks < len(self._missing) and not self._missing[blocks]:
            blocks += 1
        return blocks

    def shorten(self, blocks: int) -> bool:
        """Expects only the first ``blocks`` of the blocks. Returns False if there is news of a piece of another one."""
        for known in (self._announced, self._found):
            for digests, most in zip(known, self._most_parts, strict=True):
                if any(digest is not None for digest in digests[blocks * most :]):
                    return False
                del digests[blocks * most :]
        del self._missing[blocks:]
        self._left = sum(self._missing)
        totals = [sum(of_group) for of_group in self._parts]
        self._pieces = sum(totals[group] for group in self._groups[:blocks])
        return True

    def landed(self, rank: int, index: int, digest: int) -> PieceCheck:
        """Notes that a rank has received the piece with this index."""
        return self._note(self._found, self._announced, rank, index, digest)

    def announced(self, rank: int, index: int, digest: int) -> PieceCheck:
        """Notes the digest that the sender announced for the piece with this index."""
        return self._note(self._announced, self._found, rank, index, digest)

    def _note(
        self, known: list[list[int | None]], other: list[list[int | None]], rank: int, index: int, digest: int
    ) -> PieceCheck:
        if not 0 <= rank < len(known):
            return PieceCheck.IGNORED
        most = self._most_parts[rank]
        at = index - self._first_block * most
        if not 0 <= at < len(known[rank]) or (self._gaps and self._is_gap(rank, at)):
            return PieceCheck.CORRUPT if self._exact else PieceCheck.IGNORED
        before = known[rank][at]
        if before is not None:
            return PieceCheck.IGNORED if before == digest else PieceCheck.CORRUPT
        known[rank][at] = digest
        if self._checked:
            expected = other[rank][at]
            if expected is None:
                return PieceCheck.FINE
            if expected != digest:
                return PieceCheck.CORRUPT
        elif known is self._announced:
            return PieceCheck.FINE
        self._missing[at // most] -= 1
        self._left -= 1
        return PieceCheck.FINE

    def _is_gap(self, rank: int, at: int) -> bool:
        block, part = divmod(at, self._most_parts[rank])
        parts: int = self._parts[self._groups[block]][rank]
        return part >= parts
