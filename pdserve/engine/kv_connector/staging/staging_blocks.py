"""Gives out the blocks of host memory that KV blocks pass through, and says which transfer may have how many."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from pdserve.wire.ids import TransferId


class StagingIds:
    """The ids that transfers know staging blocks by (``KvRegion.of_staging``).

    A staging block that takes a block of the cache has an id that says of which group that is.
    """

    def __init__(self, count: int, group_of: Callable[[int], int] | None = None) -> None:
        """There are ``count`` staging blocks. ``group_of`` returns the group of a block of the cache; without it, all
        are of one.
        """
        self._count = count
        self._group_of = group_of

    def of(self, staged: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
        """Returns the ids of staging blocks, each of which takes one of these blocks of the cache."""
        if self._group_of is None:
            return tuple(staged)
        return tuple(self._group_of(block) * self._count + at for at, block in zip(staged, blocks, strict=True))

    def staged(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the staging blocks that have these ids."""
        return tuple(ids) if self._group_of is None else tuple(number % self._count for number in ids)


_TURNS = 16
_TRANSFERS = 4
_PEERS = 2


@dataclass(slots=True)
class _Holder:
    peer: bytes
    wanted: int = 0
    held: int = 0


class StagingBlocks:
    """Transfers take staging blocks for KV blocks that move now, by turns, and give each back when its block has moved.

    So a prompt of any length passes through a few staging blocks, and a short one passes a long one. No transfer has
    more than a quarter of them, and those to one peer together no more than half: one that does not move keeps no other
    out.
    """

    def __init__(self, ids: range) -> None:
        """``ids`` are the staging blocks that are given out here."""
        self.total = total = len(ids)
        self._turn, self._share, self._peer_share = (max(1, total // of) for of in (_TURNS, _TRANSFERS, _PEERS))
        self._free = list(ids)
        self._holders: dict[TransferId, _Holder] = {}
        self._queue: OrderedDict[TransferId, None] = OrderedDict()
        self._held_by_peer: Counter[bytes] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def want(self, transfer: TransferId, peer: bytes, count: int) -> None:
        """Asks for ``count`` more blocks, which ``granted`` will give by turns. ``peer`` is the other engine."""
        self._holders.setdefault(transfer, _Holder(peer)).wanted += count
        self._queue[transfer] = None

    def spare(self, transfer: TransferId, peer: bytes, count: int) -> tuple[int, ...]:
        """Returns up to ``count`` staging blocks at once, for KV blocks that cannot move yet.

        Half of all staging blocks, and of the peer's, are kept for KV blocks that can move. Otherwise one transfer
        would hold staging blocks here and wait for some at the other end, and another the other way round.
        """
        holder = self._holders.setdefault(transfer, _Holder(peer))
        of_peer = self._peer_share // 2 - self._held_by_peer[peer]
        given = max(0, min(count, self._room(holder), of_peer, len(self._free) - (self.total + 1) // 2))
        self._hold(holder, given)
        self._forget_if_over(transfer)
        return self._take(given)

    def wants(self, transfer: TransferId) -> bool:
        """Returns whether the transfer waits for staging blocks."""
        return transfer in self._queue

    def withdraw(self, transfer: TransferId) -> None:
        """Ends the transfer's turns. It still has to give back what it holds."""
        self._queue.pop(transfer, None)
        self._forget_if_over(transfer)

    def granted(self) -> Iterator[tuple[TransferId, tuple[int, ...]]]:
        """Yields each transfer whose turn it is, with its new staging blocks.

        The lowest ones come first, so that most are neighbours and move in one copy.
        """
        passed = 0
        while self._free and passed < len(self._queue):
            transfer, _ = self._queue.popitem(last=False)
            holder = self._holders[transfer]
            count = max(0, min(holder.wanted, self._turn, self._room(holder), len(self._free)))
            holder.wanted -= count
            self._hold(holder, count)
            if holder.wanted:
                self._queue[transfer] = None
            passed = 0 if count else passed + 1
            if count:
                yield transfer, self._take(count)

    def give_back(self, transfer: TransferId, staged: Collection[int]) -> None:
        if not staged:
            return
        holder = self._holders[transfer]
        self._hold(holder, -len(staged))
        for block in staged:
            heapq.heappush(self._free, block)
        self._forget_if_over(transfer)

    def _room(self, holder: _Holder) -> int:
        return min(self._share - holder.held, self._peer_share - self._held_by_peer[holder.peer])

    def _hold(self, holder: _Holder, more: int) -> None:
        holder.held += more
        self._held_by_peer[holder.peer] += more

    def _take(self, count: int) -> tuple[int, ...]:
        return tuple(heapq.heappop(self._free) for _ in range(count))

    def _forget_if_over(self, transfer: TransferId) -> None:
        holder = self._holders.get(transfer)
        if holder is not None and not holder.held and transfer not in self._queue:
            del self._holders[transfer]
            if not self._held_by_peer[holder.peer]:
                del self._held_by_peer[holder.peer]
