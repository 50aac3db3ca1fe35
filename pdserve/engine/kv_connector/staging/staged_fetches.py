"""Fetches into a KV cache that lies outside of host memory: each block lands in a staging block, then is copied.

To the transfer thread the staging blocks are the engine's cache. A fetch takes staging blocks for KV blocks that the
prefill node is ready to send, by turns with the others, and gives each back when it was copied: so what waits for
staging blocks waits for copies, and for nothing else. A fetch takes some before that only while nobody needs them,
which saves a turn of the step loop. A peer never touches the real cache, and no block of it is ever quarantined; a
staging block may be.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from pdserve.engine.kv_connector.staging.block_copier import Copier
from pdserve.engine.kv_connector.staging.staging_blocks import StagingBlocks
from pdserve.engine.kv_connector.transfers import PacedFetches
from pdserve.wire.ids import TransferId
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    BlocksReleased,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    TransferEvent,
    TransferThreadDied,
)
from pdserve_kvtransfer.stats import TransferStats


@dataclass(slots=True)
class _StagedFetch:
    """Counts are of blocks from the first wanted one on."""

    order: FetchOrder
    coming: int = 0
    """The prefill node can send them, or they were accepted before it could."""
    accepted: int = 0
    """They have, or had, slots."""
    landed: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    """By the block's place in the order: those accepted and not copied to the cache yet."""
    uploads: int = 0
    """Copies under way, from slots to the cache's blocks."""
    cancelled: bool = False
    end: TransferEvent | None = None
    """What the connector hears after the copies."""


@dataclass(frozen=True, slots=True)
class LandedBlocks:
    """Of blocks that have landed, by their places in the order."""

    transfer: TransferId
    places: range


class StagedFetches:
    """Satisfies ``Fetches``. Used by the step loop's thread alone."""

    def __init__(self, thread: PacedFetches, copier: Copier[LandedBlocks], slots: StagingBlocks) -> None:
        """``copier`` is this object's to close."""
        self._thread, self._copier, self._slots = thread, copier, slots
        self._fetches: dict[TransferId, _StagedFetch] = {}
        self._quarantined: dict[int, TransferId] = {}
        """Slots that the transfer thread will release, by whom they are held until then."""
        self._news: list[TransferEvent] = []

    def fetch(self, order: FetchOrder) -> None:
        transfer, count = order.transfer_id, len(order.block_ids)
        slots = self._slots.spare(transfer, order.target.boot_id, count)
        self._fetches[transfer] = _StagedFetch(order, len(slots), len(slots), slots=dict(enumerate(slots)))
        self._thread.fetch(dataclasses.replace(order, block_ids=slots, paced_blocks=count))

    def cancel_fetch(self, transfer_id: TransferId) -> None:
        fetch = self._fetches.get(transfer_id)
        if fetch is None:
            return
        if fetch.end is not None:
            fetch.end = FetchCancelled(transfer_id, ())
            return
        fetch.cancelled = True
        self._slots.withdraw(transfer_id)
        self._thread.cancel_fetch(transfer_id)

    def events(self) -> list[TransferEvent]:
        for event in self._thread.events():
            self._on_event(event)
        for upload in self._copier.done():
            self._uploaded(upload)
        if self._copier.failure is not None:
            self._news.append(TransferThreadDied(self._copier.failure))
        self._grant()
        events, self._news = self._news, []
        return events

    def _on_event(self, event: TransferEvent) -> None:
        match event:
            case BlocksComing(transfer, count):
                self._want(self._fetches[transfer], count)
            case BlocksLanded(transfer, count):
                self._take_in(self._fetches[transfer], count)
            case FetchLanded(transfer):
                fetch = self._fetches[transfer]
                self._take_in(fetch, len(fetch.order.block_ids))
                self._end(fetch, event, ())
            case FetchFailed(transfer, _, landed, quarantined, kind):
                fetch = self._fetches[transfer]
                self._take_in(fetch, landed)
                if kind is FailureKind.DEADLINE and self._slots.wants(transfer):
                    # It was this node that had no room.
                    kind = FailureKind.OVERLOADED
                self._end(fetch, dataclasses.replace(event, quarantined=(), kind=kind), quarantined)
            case FetchCancelled(transfer, quarantined):
                self._end(self._fetches[transfer], FetchCancelled(transfer, ()), quarantined)
            case BlocksReleased(slots):
                for slot in slots:
                    self._slots.give_back(self._quarantined.pop(slot), (slot,))
            case _:
                self._news.append(event)

    def _want(self, fetch: _StagedFetch, coming: int) -> None:
        if coming > fetch.coming and not fetch.cancelled:
            order = fetch.order
            self._slots.want(order.transfer_id, order.target.boot_id, coming - fetch.coming)
            fetch.coming = coming

    def _grant(self) -> None:
        for transfer, slots in self._slots.granted():
            fetch = self._fetches[transfer]
            fetch.slots.update(enumerate(slots, fetch.accepted))
            fetch.accepted += len(slots)
            self._thread.accept_blocks(transfer, slots)

    def _take_in(self, fetch: _StagedFetch, landed: int) -> None:
        """The blocks that have landed go to the cache."""
        places = range(fetch.landed, landed)
        if not places or fetch.cancelled:
            return
        fetch.landed = landed
        fetch.uploads += 1
        slots = tuple(fetch.slots[place] for place in places)
        blocks = fetch.order.block_ids[places.start : places.stop]
        self._copier.upload(LandedBlocks(fetch.order.transfer_id, places), slots, blocks)

    def _uploaded(self, upload: LandedBlocks) -> None:
        fetch = self._fetches[upload.transfer]
        fetch.uploads -= 1
        self._slots.give_back(upload.transfer, [fetch.slots.pop(place) for place in upload.places])
        self._finish_if_quiet(fetch)

    def _end(self, fetch: _StagedFetch, end: TransferEvent, quarantined: tuple[int, ...]) -> None:
        transfer, fetch.end = fetch.order.transfer_id, end
        self._slots.withdraw(transfer)
        rest = [fetch.slots.pop(place) for place in range(fetch.landed, fetch.accepted)]
        self._quarantined.update(dict.fromkeys(quarantined, transfer))
        self._slots.give_back(transfer, [slot for slot in rest if slot not in self._quarantined])
        self._finish_if_quiet(fetch)

    def _finish_if_quiet(self, fetch: _StagedFetch) -> None:
        if fetch.end is not None and not fetch.uploads:
            del self._fetches[fetch.order.transfer_id]
            self._news.append(fetch.end)

    def stats(self) -> TransferStats:
        return self._thread.stats()

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)
        self._copier.close(timeout_s)
