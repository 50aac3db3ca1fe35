"""Transfers from and to a KV cache that lies outside of host memory: each block is copied through a staging block.

The transfer thread sees the staging blocks as the engine's cache. ``StagedTransfers`` contains both directions.

A fetch takes staging blocks for KV blocks that the prefill node is ready to send, by turns with the others, and returns
each when it was copied: so what waits for staging blocks waits for copies, and for nothing else. A fetch takes some
before that only while no other fetch needs them, which saves a turn of the step loop. A peer never touches the real
cache, and no block of it is ever quarantined; a staging block may be.

The blocks of a push are copied while the next chunk computes. A push takes staging blocks for final KV blocks only, by
turns with the others, and returns them when they have left: its blocks in the cache stay its own until then.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.kv_connector.staging.block_copier import Copier
from pdserve.engine.kv_connector.transfers import PacedFetches, PacedTransfers, Pushes
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    BlocksOffered,
    BlocksReleased,
    BlocksSent,
    CachedFetchOrder,
    CachedWanted,
    FailureKind,
    FetchCancelled,
    FetchEvent,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    PushCancelled,
    PushEnded,
    PushEvent,
    PushWanted,
    TransferEvent,
    TransferStats,
    TransferThreadDied,
)


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


@dataclass(slots=True)
class _StagedFetch:
    """One fetch under way. Blocks are counted from the first wanted one on."""

    order: FetchOrder | CachedFetchOrder
    coming: int = 0
    """The number of blocks that the prefill node can send, or that were accepted before it could."""
    accepted: int = 0
    """The number of blocks that have, or had, staging blocks."""
    landed: int = 0
    staged: dict[int, int] = field(default_factory=dict)
    """The staging block of each place in the order that is accepted and not copied to the cache yet."""
    uploads: int = 0
    """The number of copies from staging blocks to the cache that are under way."""
    cancelled: bool = False
    end: TransferEvent | None = None
    """The event that the connector gets after the copies."""


@dataclass(frozen=True, slots=True)
class LandedBlocks:
    """Blocks of one fetch that have landed, by their places in the order."""

    transfer: TransferId
    places: range


class StagedFetches:
    """Satisfies ``Fetches``. ``StagedTransfers`` tells it what transfers and copies report."""

    def __init__(
        self,
        transfers: PacedFetches,
        copier: Copier[Any],
        staging: StagingBlocks,
        report: Callable[[TransferEvent], None],
        ids: StagingIds,
    ) -> None:
        """``report`` is called with each event for the connector."""
        self._transfers, self._copier, self._staging, self._report = transfers, copier, staging, report
        self._ids = ids
        self._fetches: dict[TransferId, _StagedFetch] = {}
        self._quarantined: dict[int, TransferId] = {}
        """Staging blocks that the transfer thread will release, and the transfer that holds each until then."""

    def fetch(self, order: FetchOrder | CachedFetchOrder) -> None:
        transfer, count = order.transfer_id, len(order.block_ids)
        staged = self._staging.spare(transfer, order.target.boot_id, count)
        self._fetches[transfer] = _StagedFetch(order, len(staged), len(staged), staged=dict(enumerate(staged)))
        ids = self._ids.of(staged, order.block_ids[: len(staged)])
        self._transfers.fetch(dataclasses.replace(order, block_ids=ids, paced_blocks=count))

    def cancel_fetch(self, transfer_id: TransferId) -> None:
        fetch = self._fetches.get(transfer_id)
        if fetch is None:
            return
        if fetch.end is not None:
            fetch.end = FetchCancelled(transfer_id, ())
            return
        fetch.cancelled = True
        self._staging.withdraw(transfer_id)
        self._transfers.cancel_fetch(transfer_id)

    def offer(self, target: PrefillTarget, hashes: tuple[bytes, ...], request_id: str) -> None:
        self._transfers.offer(target, hashes, request_id)

    def on_event(self, event: FetchEvent) -> None:
        match event:
            case BlocksComing(transfer, count):
                self._request_staging(self._fetches[transfer], count)
            case BlocksLanded(transfer, count):
                self._upload_landed(self._fetches[transfer], count)
            case FetchLanded(transfer, landed=landed):
                fetch = self._fetches[transfer]
                self._upload_landed(fetch, landed)
                self._end(fetch, event, ())
            case FetchFailed(transfer, _, landed, quarantined, kind):
                fetch = self._fetches[transfer]
                self._upload_landed(fetch, landed)
                if kind is FailureKind.DEADLINE and self._staging.wants(transfer):
                    # This node had no destinations for the blocks.
                    kind = FailureKind.OVERLOADED
                self._end(fetch, dataclasses.replace(event, quarantined=(), kind=kind), self._ids.staged(quarantined))
            case FetchCancelled(transfer, quarantined):
                self._end(self._fetches[transfer], FetchCancelled(transfer, ()), self._ids.staged(quarantined))
            case BlocksReleased(ids):
                for staged_id in self._ids.staged(ids):
                    self._staging.give_back(self._quarantined.pop(staged_id), (staged_id,))
            case _:
                self._report(event)

    def _request_staging(self, fetch: _StagedFetch, coming: int) -> None:
        if coming > fetch.coming and not fetch.cancelled:
            order = fetch.order
            self._staging.want(order.transfer_id, order.target.boot_id, coming - fetch.coming)
            fetch.coming = coming

    def grant(self) -> None:
        """Gives staging blocks to the fetches whose turn it is."""
        for transfer, staged in self._staging.granted():
            fetch = self._fetches[transfer]
            fetch.staged.update(enumerate(staged, fetch.accepted))
            blocks = fetch.order.block_ids[fetch.accepted : fetch.accepted + len(staged)]
            fetch.accepted += len(staged)
            self._transfers.accept_blocks(transfer, self._ids.of(staged, blocks))

    def _upload_landed(self, fetch: _StagedFetch, landed: int) -> None:
        """Has the blocks that have landed copied to the cache."""
        places = range(fetch.landed, landed)
        if not places or fetch.cancelled:
            return
        fetch.landed = landed
        fetch.uploads += 1
        staged = tuple(fetch.staged[place] for place in places)
        blocks = fetch.order.block_ids[places.start : places.stop]
        self._copier.upload(LandedBlocks(fetch.order.transfer_id, places), staged, blocks)

    def uploaded(self, upload: LandedBlocks) -> None:
        """A copy to the cache is over."""
        fetch = self._fetches[upload.transfer]
        fetch.uploads -= 1
        self._staging.give_back(upload.transfer, [fetch.staged.pop(place) for place in upload.places])
        self._finish_if_over(fetch)

    def _end(self, fetch: _StagedFetch, end: TransferEvent, quarantined: tuple[int, ...]) -> None:
        transfer, fetch.end = fetch.order.transfer_id, end
        self._staging.withdraw(transfer)
        rest = [fetch.staged.pop(place) for place in range(fetch.landed, fetch.accepted)]
        self._quarantined.update(dict.fromkeys(quarantined, transfer))
        self._staging.give_back(transfer, [staged_id for staged_id in rest if staged_id not in self._quarantined])
        self._finish_if_over(fetch)

    def _finish_if_over(self, fetch: _StagedFetch) -> None:
        if fetch.end is not None and not fetch.uploads:
            del self._fetches[fetch.order.transfer_id]
            self._report(fetch.end)


@dataclass(slots=True)
class _StagedPush:
    """One push under way."""

    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """The number in the prompt and the id of each final block without a staging block, in order."""
    downloads: int = 0
    """The number of copies from the cache to staging blocks that are under way."""
    sending: set[int] = field(default_factory=set)
    """The staging blocks that the transfer thread reads."""
    end: PushEnded | None = None
    """The event that the connector gets after the copies."""


@dataclass(frozen=True, slots=True)
class BlocksToSend:
    """Blocks of one push that are sent once they are in their staging blocks."""

    transfer: TransferId
    first_block: int
    blocks: tuple[int, ...]
    staged: tuple[int, ...]


class StagedPushes:
    """Satisfies ``Pushes``. ``StagedTransfers`` tells it what transfers and copies report."""

    def __init__(
        self,
        transfers: Pushes,
        copier: Copier[Any],
        staging: StagingBlocks,
        report: Callable[[TransferEvent], None],
        ids: StagingIds,
    ) -> None:
        """``report`` is called with each event for the connector."""
        self._transfers, self._copier, self._staging, self._report = transfers, copier, staging, report
        self._ids = ids
        self._pushes: dict[TransferId, _StagedPush] = {}

    def push(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None:
        push = self._pushes.get(transfer_id)
        if push is None or push.end is not None:
            return
        push.waiting += enumerate(block_ids, first_block)
        self._staging.want(transfer_id, transfer_id.decode_boot, len(block_ids))
        self.grant()

    def first_token(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self._transfers.first_token(transfer_id, tokens, cached_tokens, load, prompt_logprobs)

    def held(self, transfer_id: TransferId, count: int, usable: int = 0) -> None:
        self._transfers.held(transfer_id, count, usable)

    def tell_load(self, load: PrefillLoad) -> None:
        self._transfers.tell_load(load)

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause) -> None:
        self._transfers.fail_push(transfer_id, reason, cause)

    def on_event(self, event: PushEvent) -> None:
        match event:
            case PushWanted(transfer) | CachedWanted(transfer):
                self._pushes[transfer] = _StagedPush()
                self._report(event)
            case BlocksSent(transfer, ids):
                push, staged = self._pushes.get(transfer), self._ids.staged(ids)
                if push is not None:
                    push.sending.difference_update(staged)
                    self._staging.give_back(transfer, staged)
            case PushEnded(transfer):
                self._end(self._pushes[transfer], event)
            case _:
                self._report(event)

    def grant(self) -> None:
        """Gives staging blocks to the pushes whose turn it is."""
        for transfer, staged in self._staging.granted():
            waiting = self._pushes[transfer].waiting
            numbers, blocks = zip(*(waiting.popleft() for _ in staged), strict=True)
            # Blocks are pushed in order, from the first wanted one on, so their numbers are consecutive.
            self._pushes[transfer].downloads += 1
            self._copier.download(BlocksToSend(transfer, numbers[0], blocks, staged), blocks, staged)

    def downloaded(self, sending: BlocksToSend) -> None:
        """A copy to staging blocks is over."""
        push = self._pushes[sending.transfer]
        push.downloads -= 1
        if push.end is None:
            push.sending.update(sending.staged)
            self._transfers.push(sending.transfer, sending.first_block, self._ids.of(sending.staged, sending.blocks))
        else:
            self._staging.give_back(sending.transfer, sending.staged)
            self._end(push, push.end)

    def _end(self, push: _StagedPush, end: PushEnded) -> None:
        transfer = end.transfer_id
        if push.end is None:
            push.end = end
            push.waiting.clear()
            self._staging.withdraw(transfer)
            if push.sending:
                self._staging.give_back(transfer, push.sending)
                push.sending = set()
        if not push.downloads:
            del self._pushes[transfer]
            self._report(end)


class StagedTransfers:
    """Satisfies ``Transfers``. Only the step loop's thread uses it.

    ``fetches`` and ``pushes`` share one copier, and each has staging blocks of its own. If they shared those too, two
    nodes that fetch from each other could wait for each other for ever: the pushes of both would hold all blocks, and
    no fetch would have one to land in. So what a push waits for at the other node is never held by a push there.
    """

    def __init__(
        self,
        transfers: PacedTransfers,
        copier: Copier[LandedBlocks | BlocksToSend],
        fetch_staging: StagingBlocks,
        push_staging: StagingBlocks,
        ids: StagingIds | None = None,
    ) -> None:
        """``transfers`` reports what it has sent. This object closes it and ``copier``.

        Without ``ids``, transfers know staging blocks by their own numbers: the model has no cache groups.
        """
        ids = ids or StagingIds(fetch_staging.total + push_staging.total)
        self._transfers, self._copier = transfers, copier
        self._news: list[TransferEvent] = []
        self.fetches = StagedFetches(transfers, copier, fetch_staging, self._news.append, ids)
        self.pushes = StagedPushes(transfers, copier, push_staging, self._news.append, ids)

    def events(self) -> list[TransferEvent]:
        for event in self._transfers.events():
            match event:
                case PushWanted() | CachedWanted() | PushCancelled() | BlocksSent() | PushEnded() | BlocksOffered():
                    self.pushes.on_event(event)
                case TransferThreadDied():
                    self._news.append(event)
                case _:
                    self.fetches.on_event(event)
        for done in self._copier.done():
            match done:
                case LandedBlocks():
                    self.fetches.uploaded(done)
                case BlocksToSend():
                    self.pushes.downloaded(done)
        if self._copier.failure is not None:
            self._news.append(TransferThreadDied(self._copier.failure))
        self.fetches.grant()
        self.pushes.grant()
        events = list(self._news)
        self._news.clear()
        return events

    def meet(self, number: int, targets: tuple[PrefillTarget, ...]) -> None:
        self._transfers.meet(number, targets)

    def stats(self) -> TransferStats:
        return self._transfers.stats()

    def close(self, timeout_s: float) -> None:
        self._transfers.close(timeout_s)
        self._copier.close(timeout_s)
