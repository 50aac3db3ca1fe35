"""Fetches into a KV cache that lies outside of host memory: every block lands in a slot, and is copied from there.

To the transfer thread the slots are the engine's cache. A peer never touches the real one, so that no block of it is
ever quarantined; a slot may be.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.kv_connector.block_mover import Mover
from pdserve.engine.kv_connector.staging_slots import StagingSlots
from pdserve.engine.kv_connector.transfers import Fetches
from pdserve.wire.ids import TransferId
from pdserve_kvtransfer.events import (
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


class _Stage(enum.Enum):
    """In this order; a fetch may end from each."""

    WAITING = "waiting"
    """For slots."""
    MOVING = "moving"
    """The transfer thread has it."""
    UPLOADING = "uploading"
    """It has ended there, and what has landed goes to the cache."""


@dataclass(slots=True)
class _Fetch:
    order: FetchOrder
    deadline: float
    stage: _Stage = _Stage.WAITING
    slots: tuple[int, ...] = ()
    end: TransferEvent | None = None
    """What the connector hears after the upload."""
    quarantined: frozenset[int] = frozenset()
    """Slots that the transfer thread will release."""


class StagedFetches:
    """Satisfies ``Fetches``. Used by the step loop's thread alone."""

    def __init__(
        self,
        thread: Fetches,
        mover: Mover[TransferId],
        slots: StagingSlots,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wake`` has the step loop ask for events soon; ``mover`` is this object's to close."""
        self._thread, self._mover, self._slots = thread, mover, slots
        self._wake, self._clock = wake, clock
        self._fetches: dict[TransferId, _Fetch] = {}
        self._news: list[TransferEvent] = []

    def fetch(self, order: FetchOrder) -> None:
        transfer, count = order.transfer_id, len(order.block_ids)
        misfit = self._slots.misfit(count)
        if misfit is not None:
            self._news.append(FetchFailed(transfer, misfit, 0, (), FailureKind.REFUSED))
        else:
            self._fetches[transfer] = _Fetch(order, self._clock() + order.deadline_s)
            self._slots.ask(transfer, count)
            self._grant()
        if self._news:
            self._wake()

    def cancel_fetch(self, transfer_id: TransferId) -> None:
        fetch = self._fetches.get(transfer_id)
        if fetch is None:
            return
        match fetch.stage:
            case _Stage.WAITING:
                self._slots.withdraw(transfer_id)
                self._end(transfer_id, FetchCancelled(transfer_id, ()))
                self._wake()
            case _Stage.MOVING:
                self._thread.cancel_fetch(transfer_id)
            case _Stage.UPLOADING:
                fetch.end = FetchCancelled(transfer_id, ())

    def events(self) -> list[TransferEvent]:
        for event in self._thread.events():
            self._on_event(event)
        for transfer in self._mover.done():
            end = self._fetches[transfer].end
            if end is not None:
                self._end(transfer, end)
        if self._mover.failure is not None:
            self._news.append(TransferThreadDied(self._mover.failure))
        self._grant()
        events, self._news = self._news, []
        return events

    def _on_event(self, event: TransferEvent) -> None:
        match event:
            case FetchLanded(transfer):
                self._take_in(transfer, event, len(self._fetches[transfer].slots))
            case FetchFailed(transfer, _, landed, quarantined):
                self._fetches[transfer].quarantined = frozenset(quarantined)
                self._take_in(transfer, dataclasses.replace(event, quarantined=()), landed)
            case FetchCancelled(transfer, quarantined):
                self._fetches[transfer].quarantined = frozenset(quarantined)
                self._end(transfer, FetchCancelled(transfer, ()))
            case BlocksReleased(slots):
                self._slots.give_back(slots)
            case _:
                self._news.append(event)

    def _grant(self) -> None:
        for transfer, slots in self._slots.granted():
            fetch = self._fetches[transfer]
            fetch.slots = slots
            left_s = fetch.deadline - self._clock()
            if left_s > 0:
                fetch.stage = _Stage.MOVING
                self._thread.fetch(dataclasses.replace(fetch.order, block_ids=slots, deadline_s=left_s))
            else:
                reason = "deadline: there was no host memory to receive it in"
                self._end(transfer, FetchFailed(transfer, reason, 0, (), FailureKind.OVERLOADED))

    def _take_in(self, transfer: TransferId, end: TransferEvent, landed: int) -> None:
        """The leading blocks that landed go to the cache; then the connector hears of the end."""
        fetch = self._fetches[transfer]
        if landed:
            fetch.stage, fetch.end = _Stage.UPLOADING, end
            self._mover.upload(transfer, fetch.slots[:landed], fetch.order.block_ids[:landed])
        else:
            self._end(transfer, end)

    def _end(self, transfer: TransferId, end: TransferEvent) -> None:
        fetch = self._fetches.pop(transfer)
        self._slots.give_back(slot for slot in fetch.slots if slot not in fetch.quarantined)
        self._news.append(end)

    def stats(self) -> TransferStats:
        return self._thread.stats()

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)
        self._mover.close(timeout_s)
