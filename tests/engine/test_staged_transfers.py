"""Who may touch a slot or a block while it is copied: the staged transfers with a scripted thread and mover."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.kv_connector.staged_fetches import StagedFetches
from pdserve.engine.kv_connector.staged_pushes import StagedPushes
from pdserve.engine.kv_connector.staging_slots import StagingSlots
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling import SampledToken, SamplingParams
from pdserve.wire.ticket import PrefillTarget
from pdserve.wire.transfer import UNKNOWN_LOAD
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
    TransferEvent,
    TransferThreadDied,
)
from tests.engine.test_kv_connector import ScriptedThread

SLOTS, BLOCK_SIZE = 6, 4
SAMPLING = SamplingParams(max_tokens=1, seed=0)
TARGET = PrefillTarget("p", "tcp://127.0.0.1:1", new_id())


class ScriptedMover:
    """Says that a copy is done when a test does."""

    def __init__(self) -> None:
        self.uploads: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.downloads: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.failure: str | None = None
        self._under_way: list[Any] = []
        self._done: list[Any] = []

    def upload(self, key: object, slots: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        self.uploads.append((slots, blocks))
        self._under_way.append(key)

    def download(self, key: object, blocks: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self.downloads.append((blocks, slots))
        self._under_way.append(key)

    def finish(self, count: int = 100) -> None:
        self._done += self._under_way[:count]
        del self._under_way[:count]

    def done(self) -> list[Any]:
        done, self._done = self._done, []
        return done


class Desk:
    """The parts, and a clock."""

    def __init__(self) -> None:
        self.thread, self.mover, self.slots = ScriptedThread(), ScriptedMover(), StagingSlots(SLOTS)
        self.now = 0.0
        self.wakes = 0
        thread: Any = self.thread
        mover: Any = self.mover
        self.fetches = StagedFetches(thread, mover, self.slots, self._wake, lambda: self.now)
        self.pushes = StagedPushes(thread, mover, self.slots, BLOCK_SIZE)

    def _wake(self) -> None:
        self.wakes += 1

    def order(self, *blocks: int, deadline_s: float = 10.0) -> FetchOrder:
        transfer = TransferId(new_id(), 0, b"boot")
        order = FetchOrder(transfer, TARGET, [7] * BLOCK_SIZE * len(blocks), 0, blocks, SAMPLING, deadline_s)
        self.fetches.fetch(order)
        return order

    def heard(self, *events: TransferEvent) -> list[TransferEvent]:
        self.thread.pending += events
        return self.fetches.events()

    def wanted(self, blocks: int, first_block: int = 0) -> PushWanted:
        transfer = TransferId(new_id(), 0, b"boot")
        return PushWanted(transfer, [7] * BLOCK_SIZE * (first_block + blocks), first_block, SAMPLING, 9.0)

    def pushed(self, *events: TransferEvent) -> list[TransferEvent]:
        self.thread.pending += events
        return self.pushes.events()


# ------------------------------------------------------------ a decode node


def test_what_lands_in_slots_is_copied_before_the_connector_hears_of_it() -> None:
    desk = Desk()
    order = desk.order(30, 31, 32)
    (inner,) = desk.thread.fetched
    assert (inner.block_ids, inner.deadline_s) == ((0, 1, 2), 10.0)
    first = FirstTokenArrived(order.transfer_id, (SampledToken(5),), 0)
    assert desk.heard(first) == [first]
    landed = FetchLanded(order.transfer_id, 0.1, 100)
    assert desk.heard(landed) == []
    assert desk.mover.uploads == [((0, 1, 2), (30, 31, 32))]
    assert desk.slots.num_free == SLOTS - 3
    desk.mover.finish()
    assert desk.heard() == [landed]
    assert desk.slots.num_free == SLOTS


def test_a_failed_fetch_keeps_what_landed_and_its_slots_until_they_are_safe() -> None:
    desk = Desk()
    order = desk.order(30, 31, 32, 33)
    assert desk.heard(FetchFailed(order.transfer_id, "lost", 2, (3,))) == []
    assert desk.mover.uploads == [((0, 1), (30, 31))]
    desk.mover.finish()
    # Of the cache itself nothing is in quarantine.
    assert desk.heard() == [FetchFailed(order.transfer_id, "lost", 2, ())]
    assert desk.slots.num_free == SLOTS - 1
    assert desk.heard(BlocksReleased((3,))) == []
    assert desk.slots.num_free == SLOTS


def test_a_fetch_that_fails_with_nothing_copies_nothing() -> None:
    desk = Desk()
    order = desk.order(30)
    failed = FetchFailed(order.transfer_id, "refused", 0, (), FailureKind.REFUSED)
    assert desk.heard(failed) == [failed]
    assert desk.mover.uploads == []
    assert desk.slots.num_free == SLOTS


def test_fetches_wait_for_host_memory_in_turn() -> None:
    desk = Desk()
    first, second, third = desk.order(10, 11, 12, 13), desk.order(20, 21, 22), desk.order(30)
    assert [order.transfer_id for order in desk.thread.fetched] == [first.transfer_id]
    desk.now = 4.0
    desk.heard(FetchCancelled(first.transfer_id, ()))
    assert [order.transfer_id for order in desk.thread.fetched[1:]] == [second.transfer_id, third.transfer_id]
    assert [order.deadline_s for order in desk.thread.fetched[1:]] == [6.0, 6.0]


def test_a_fetch_whose_time_passed_while_it_waited_fails() -> None:
    desk = Desk()
    first, late, third = desk.order(10, 11, 12, 13), desk.order(20, 21, 22, deadline_s=1.0), desk.order(30, 31)
    desk.now = 2.0
    events = desk.heard(FetchCancelled(first.transfer_id, ()))
    assert [type(event) for event in events] == [FetchCancelled, FetchFailed]
    assert isinstance(events[1], FetchFailed)
    assert (events[1].transfer_id, events[1].kind) == (late.transfer_id, FailureKind.OVERLOADED)
    assert desk.thread.fetched[-1].transfer_id == third.transfer_id
    assert desk.slots.num_free == SLOTS - 2


def test_a_prompt_that_never_fits_fails_at_once_and_the_loop_is_woken() -> None:
    desk = Desk()
    desk.order(*range(SLOTS + 1))
    assert desk.wakes == 1
    (failed,) = desk.heard()
    assert isinstance(failed, FetchFailed)
    assert failed.kind is FailureKind.REFUSED
    assert "--kv-staging-mib" in failed.reason
    assert desk.slots.num_free == SLOTS


@pytest.mark.parametrize("stage", ["waiting", "moving", "uploading"])
def test_cancel_in_every_stage(stage: str) -> None:
    desk = Desk()
    other = desk.order(*range(5)) if stage == "waiting" else None
    order = desk.order(30, 31)
    if stage == "uploading":
        desk.heard(FetchLanded(order.transfer_id, 0.1, 1))
    desk.fetches.cancel_fetch(order.transfer_id)
    if stage == "waiting":
        assert desk.wakes == 1
    if stage == "moving":
        assert desk.thread.cancelled == [order.transfer_id]
        assert desk.heard(FetchCancelled(order.transfer_id, (1,))) == [FetchCancelled(order.transfer_id, ())]
        assert desk.slots.num_free == SLOTS - 1
        desk.heard(BlocksReleased((1,)))
    else:
        assert desk.thread.cancelled == []
        if stage == "uploading":
            # The copy still writes to the cache's blocks.
            assert desk.heard() == []
            desk.mover.finish()
        assert desk.heard() == [FetchCancelled(order.transfer_id, ())]
    desk.fetches.cancel_fetch(order.transfer_id)
    if other is not None:
        desk.heard(FetchCancelled(other.transfer_id, ()))
    assert desk.slots.num_free == SLOTS


# ------------------------------------------------------------ a prefill node


def test_blocks_are_sent_when_they_are_in_their_slots() -> None:
    desk = Desk()
    wanted = desk.wanted(3, first_block=2)
    assert desk.pushed(wanted) == [wanted]
    desk.pushes.push(wanted.transfer_id, 2, (50, 51))
    desk.pushes.first_token(wanted.transfer_id, (SampledToken(5),), 0, UNKNOWN_LOAD)
    desk.pushes.push(wanted.transfer_id, 4, (52,))
    assert desk.thread.first_tokens == [5]
    assert desk.mover.downloads == [((50, 51), (0, 1)), ((52,), (2,))]
    assert desk.thread.pushed == []
    desk.mover.finish(1)
    desk.pushed()
    assert desk.thread.pushed == [(2, (0, 1))]
    desk.mover.finish()
    ended = PushEnded(wanted.transfer_id, PushOutcome.DONE)
    desk.pushed()
    assert desk.pushed(ended) == [ended]
    assert desk.thread.pushed == [(2, (0, 1)), (4, (2,))]
    assert desk.slots.num_free == SLOTS


def test_a_push_that_ends_under_a_copy_is_over_after_it() -> None:
    desk = Desk()
    wanted = desk.wanted(3)
    desk.pushed(wanted)
    desk.pushes.push(wanted.transfer_id, 0, (50,))
    desk.pushes.push(wanted.transfer_id, 1, (51,))
    cancelled, ended = PushCancelled(wanted.transfer_id), PushEnded(wanted.transfer_id, PushOutcome.CANCELLED)
    assert desk.pushed(cancelled, ended) == [cancelled]
    desk.pushes.push(wanted.transfer_id, 2, (52,))
    assert len(desk.mover.downloads) == 2
    desk.mover.finish(1)
    assert desk.pushed() == []
    assert desk.slots.num_free == SLOTS - 3
    desk.mover.finish(1)
    assert desk.pushed() == [ended]
    assert desk.thread.pushed == []
    assert desk.slots.num_free == SLOTS


def test_a_push_that_ends_while_it_waits_was_never_there() -> None:
    desk = Desk()
    holder, waiting = desk.wanted(5), desk.wanted(2)
    assert desk.pushed(holder, waiting) == [holder]
    ends = PushCancelled(waiting.transfer_id), PushEnded(waiting.transfer_id, PushOutcome.CANCELLED)
    assert desk.pushed(*ends) == []
    ended = PushEnded(holder.transfer_id, PushOutcome.PEER_LOST)
    assert desk.pushed(ended) == [ended]
    assert desk.slots.num_free == SLOTS


def test_a_waiting_push_has_its_turn() -> None:
    desk = Desk()
    holder, waiting = desk.wanted(5), desk.wanted(2)
    desk.pushed(holder, waiting)
    ended = PushEnded(holder.transfer_id, PushOutcome.DONE)
    assert desk.pushed(ended) == [ended, waiting]


def test_a_prompt_that_never_fits_is_refused_without_the_connector() -> None:
    desk = Desk()
    wanted = desk.wanted(SLOTS + 1)
    assert desk.pushed(wanted) == []
    assert "--kv-staging-mib" in desk.thread.failed[0]
    assert desk.pushed(PushEnded(wanted.transfer_id, PushOutcome.FAILED)) == []
    assert desk.slots.num_free == SLOTS


def test_copies_that_have_ended_for_ever_end_the_engine() -> None:
    desk = Desk()
    desk.mover.failure = "RuntimeError: no such device"
    assert desk.heard() == [TransferThreadDied("RuntimeError: no such device")]
    assert desk.pushed() == [TransferThreadDied("RuntimeError: no such device")]
