"""Fetches into a KV cache that lies outside of host memory: each block lands in a staging block, then is copied.

The transfer thread sees the staging blocks as the engine's cache. A fetch takes staging blocks for KV blocks that the
prefill node is ready to send, by turns with the others, and gives each back when it was copied: so what waits for
staging blocks waits for copies, and for nothing else. A fetch takes some before that only while no other fetch needs
them, which saves a turn of the step loop. A peer never touches the real cache, and no block of it is ever quarantined;
a staging block may be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.kv_connector.staging.block_copier import Copier
from pdserve.engine.kv_connector.staging.staging_blocks import StagingBlocks
from pdserve.engine.kv_connector.transfers import PacedFetches
from pdserve.wire.ids import TransferId
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    BlocksReleased,
    CachedFetchOrder,
    FailureKind,
    FetchCancelled,
    FetchEvent,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    TransferEvent,
)


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
    ) -> None:
        """``report`` is called with each event for the connector."""
        self._transfers, self._copier, self._staging, self._report = transfers, copier, staging, report
        self._fetches: dict[TransferId, _StagedFetch] = {}
        self._quarantined: dict[int, TransferId] = {}
        """Staging blocks that the transfer thread will release, and the transfer that holds each until then."""

    def fetch(self, order: FetchOrder | CachedFetchOrder) -> None:
        transfer, count = order.transfer_id, len(order.block_ids)
        staged = self._staging.spare(transfer, order.target.boot_id, count)
        self._fetches[transfer] = _StagedFetch(order, len(staged), len(staged), staged=dict(enumerate(staged)))
        self._transfers.fetch(dataclasses.replace(order, block_ids=staged, paced_blocks=count))

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
                    # This node had no room for the blocks.
                    kind = FailureKind.OVERLOADED
                self._end(fetch, dataclasses.replace(event, quarantined=(), kind=kind), quarantined)
            case FetchCancelled(transfer, quarantined):
                self._end(self._fetches[transfer], FetchCancelled(transfer, ()), quarantined)
            case BlocksReleased(staged):
                for staged_id in staged:
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
            fetch.accepted += len(staged)
            self._transfers.accept_blocks(transfer, staged)

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
