"""Pushes out of a KV cache that lies outside of host memory: every block is copied to a slot, and sent from there.

To the transfer thread the slots are the engine's cache. The blocks of a chunk are copied while the next chunk computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.kv_connector.block_mover import Mover
from pdserve.engine.kv_connector.staging_slots import StagingSlots
from pdserve.engine.kv_connector.transfers import Pushes
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling import SampledToken
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import PushCancelled, PushEnded, PushWanted, TransferEvent, TransferThreadDied
from pdserve_kvtransfer.stats import TransferStats


@dataclass(slots=True)
class _Push:
    wanted: PushWanted
    slots: tuple[int, ...] = ()
    """Empty while it waits for them: the connector does not know of it yet."""
    downloads: int = 0
    """Copies under way, from the cache's blocks to the slots."""
    end: PushEnded | None = None
    """What the connector hears after them."""


@dataclass(frozen=True, slots=True)
class Sending:
    """Blocks that are sent when they are in their slots."""

    transfer: TransferId
    first_index: int
    slots: tuple[int, ...]


class StagedPushes:
    """Satisfies ``Pushes``. Used by the step loop's thread alone."""

    def __init__(self, thread: Pushes, mover: Mover[Sending], slots: StagingSlots, block_size: int) -> None:
        """``mover`` is this object's to close."""
        self._thread, self._mover, self._slots = thread, mover, slots
        self._block_size = block_size
        self._pushes: dict[TransferId, _Push] = {}
        self._news: list[TransferEvent] = []

    def push(self, transfer_id: TransferId, first_index: int, block_ids: tuple[int, ...]) -> None:
        push = self._pushes.get(transfer_id)
        if push is None or push.end is not None:
            return
        start = first_index - push.wanted.first_block
        slots = push.slots[start : start + len(block_ids)]
        push.downloads += 1
        self._mover.download(Sending(transfer_id, first_index, slots), block_ids, slots)

    def first_token(
        self, transfer_id: TransferId, tokens: tuple[SampledToken, ...], cached_tokens: int, load: PrefillLoad
    ) -> None:
        self._thread.first_token(transfer_id, tokens, cached_tokens, load)

    def tell_load(self, load: PrefillLoad) -> None:
        self._thread.tell_load(load)

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause) -> None:
        self._thread.fail_push(transfer_id, reason, cause)

    def events(self) -> list[TransferEvent]:
        for event in self._thread.events():
            self._on_event(event)
        for sending in self._mover.done():
            self._downloaded(sending)
        if self._mover.failure is not None:
            self._news.append(TransferThreadDied(self._mover.failure))
        for transfer, slots in self._slots.granted():
            push = self._pushes[transfer]
            push.slots = slots
            self._news.append(push.wanted)
        events, self._news = self._news, []
        return events

    def _on_event(self, event: TransferEvent) -> None:
        match event:
            case PushWanted():
                self._want(event)
            case PushCancelled(transfer):
                if self._known(transfer):
                    self._news.append(event)
            case PushEnded(transfer):
                # Otherwise it was refused in ``_want``.
                if transfer in self._pushes:
                    self._end(self._pushes[transfer], event)
            case _:
                self._news.append(event)

    def _want(self, wanted: PushWanted) -> None:
        count = -(-len(wanted.token_ids) // self._block_size) - wanted.first_block
        misfit = self._slots.misfit(count)
        if misfit is not None:
            self._thread.fail_push(wanted.transfer_id, misfit, FailureCause.PROMPT)
            return
        self._pushes[wanted.transfer_id] = _Push(wanted)
        self._slots.ask(wanted.transfer_id, count)

    def _known(self, transfer: TransferId) -> bool:
        """To the connector."""
        return transfer in self._pushes and bool(self._pushes[transfer].slots)

    def _downloaded(self, sending: Sending) -> None:
        push = self._pushes[sending.transfer]
        push.downloads -= 1
        if push.end is None:
            self._thread.push(sending.transfer, sending.first_index, sending.slots)
        else:
            self._end(push, push.end)

    def _end(self, push: _Push, end: PushEnded) -> None:
        push.end = end
        if push.downloads:
            return
        del self._pushes[end.transfer_id]
        self._slots.give_back(push.slots)
        if not self._slots.withdraw(end.transfer_id):
            self._news.append(end)

    def stats(self) -> TransferStats:
        return self._thread.stats()

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)
        self._mover.close(timeout_s)
