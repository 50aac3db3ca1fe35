"""Tests what may touch a block while it is copied: the staged transfers with a scripted thread and copier."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.kv_connector.staging.staged_transfers import StagedTransfers, StagingBlocks
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import UNKNOWN_LOAD
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
from tests.engine.kv_connector.test_connectors import ScriptedThread

STAGING, BLOCK_SIZE = 6, 4
SAMPLING = SamplingParams(max_tokens=1, seed=0)
TARGET = PrefillTarget("p", "tcp://127.0.0.1:1", new_id())


class ScriptedCopier:
    """Finishes a copy when the test says so."""

    def __init__(self) -> None:
        self.uploads: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.downloads: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.failure: str | None = None
        self._under_way: list[Any] = []
        self._done: list[Any] = []

    def upload(self, key: object, staged: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        self.uploads.append((staged, blocks))
        self._under_way.append(key)

    def download(self, key: object, blocks: tuple[int, ...], staged: tuple[int, ...]) -> None:
        self.downloads.append((blocks, staged))
        self._under_way.append(key)

    def finish(self, count: int = 100) -> None:
        self._done += self._under_way[:count]
        del self._under_way[:count]

    def done(self) -> list[Any]:
        done, self._done = self._done, []
        return done


class Desk:
    """The staged transfers of one node, with their thread, copier and staging blocks."""

    def __init__(self, staging_blocks: int = STAGING) -> None:
        self.thread, self.copier = ScriptedThread(), ScriptedCopier()
        # Staging blocks are no kernel's.
        self.thread.writes_finished = True
        self.staging = StagingBlocks(range(staging_blocks))
        self.push_staging = StagingBlocks(range(staging_blocks))
        thread: Any = self.thread
        copier: Any = self.copier
        self.transfers = StagedTransfers(thread, copier, self.staging, self.push_staging)
        self.fetches, self.pushes = self.transfers.fetches, self.transfers.pushes

    def order(self, *blocks: int, target: PrefillTarget = TARGET) -> FetchOrder:
        transfer = TransferId(new_id(), 0, b"boot")
        order = FetchOrder(transfer, target, [7] * BLOCK_SIZE * len(blocks), 0, blocks, SAMPLING, 10.0)
        self.fetches.fetch(order)
        return order

    def heard(self, *events: TransferEvent) -> list[TransferEvent]:
        self.thread.pending += events
        return self.transfers.events()

    def wanted(self, blocks: int, first_block: int = 0, boot: bytes = b"boot") -> PushWanted:
        transfer = TransferId(new_id(), 0, boot)
        return PushWanted(transfer, [7] * BLOCK_SIZE * (first_block + blocks), first_block, SAMPLING, 9.0)

    def pushed(self, *events: TransferEvent) -> list[TransferEvent]:
        self.thread.pending += events
        return self.transfers.events()


# ------------------------------------------------------------ a decode node


def test_a_short_prompt_has_its_staging_blocks_at_once_and_is_copied_before_the_connector_hears_of_it() -> None:
    desk = Desk(staging_blocks=12)
    order = desk.order(30, 31, 32)
    (inner,) = desk.thread.fetched
    assert (inner.block_ids, inner.paced_blocks, inner.deadline_s) == ((0, 1, 2), 3, 10.0)
    first = FirstTokenArrived(order.transfer_id, (SampledToken(5),), 0)
    assert desk.heard(first, BlocksComing(order.transfer_id, 3)) == [first]
    assert desk.thread.accepted == []
    landed = FetchLanded(order.transfer_id, 0.1, 100, landed=len(order.block_ids))
    assert desk.heard(BlocksLanded(order.transfer_id, 2)) == []
    assert desk.heard(landed) == []
    assert desk.copier.uploads == [((0, 1), (30, 31)), ((2,), (32,))]
    desk.copier.finish(1)
    assert desk.heard() == []
    assert desk.staging.num_free == 11
    desk.copier.finish()
    assert desk.heard() == [landed]
    assert desk.staging.num_free == 12


def test_a_fetch_of_any_length_passes_through_few_staging_blocks() -> None:
    desk = Desk(staging_blocks=2)
    blocks = tuple(range(100, 150))
    order = desk.order(*blocks)
    assert [inner.block_ids for inner in desk.thread.fetched] == [()], "none can be spared"
    desk.heard(BlocksComing(order.transfer_id, 20))
    desk.heard(BlocksComing(order.transfer_id, 50))
    for landed in range(1, 51):
        assert len(desk.thread.accepted) == landed, "no more than the staging blocks hold"
        desk.heard(BlocksLanded(order.transfer_id, landed))
        desk.copier.finish()
        desk.heard()
    assert [into for _, into in desk.copier.uploads] == [(block,) for block in blocks]
    ended = FetchLanded(order.transfer_id, 0.1, 100, landed=len(order.block_ids))
    assert desk.heard(ended) == [ended]
    assert desk.staging.num_free == 2


def test_staging_blocks_are_held_by_what_can_move_and_by_no_prefill_node_that_does_not_send() -> None:
    desk = Desk(staging_blocks=8)
    stuck = [desk.order(*range(10 * i, 10 * i + 4)) for i in range(1, 9)]
    assert sum(len(order.block_ids) for order in desk.thread.fetched) == 2, (
        "a quarter of them, before anything is ready"
    )
    other = desk.order(7, 8, 9, target=PrefillTarget("q", "tcp://127.0.0.1:2", new_id()))
    assert [order.transfer_id for order in desk.thread.fetched] == [order.transfer_id for order in (*stuck, other)]
    desk.heard(BlocksComing(other.transfer_id, 3))
    for landed in (2, 3):
        desk.heard(BlocksLanded(other.transfer_id, landed))
        desk.copier.finish()
        desk.heard()
    ended = FetchLanded(other.transfer_id, 0.1, 1, landed=len(other.block_ids))
    assert desk.heard(ended) == [ended]
    assert desk.staging.num_free == 6


def test_a_short_fetch_passes_a_long_one() -> None:
    desk = Desk(staging_blocks=4)
    long = desk.order(*range(100, 150))
    desk.heard(BlocksComing(long.transfer_id, 50))
    short = desk.order(7, 8)
    desk.heard(BlocksComing(short.transfer_id, 2))
    for _ in range(4):
        for fetch in (long, short):
            desk.heard(BlocksLanded(fetch.transfer_id, desk.fetches._fetches[fetch.transfer_id].accepted))
        desk.copier.finish()
        desk.heard()
    assert desk.fetches._fetches[short.transfer_id].landed == 2
    assert desk.fetches._fetches[long.transfer_id].landed < 10


def test_a_failed_fetch_keeps_what_landed_and_its_staging_blocks_until_they_are_safe() -> None:
    desk = Desk(staging_blocks=16)
    order = desk.order(30, 31, 32, 33)
    assert desk.heard(BlocksComing(order.transfer_id, 4), BlocksLanded(order.transfer_id, 1)) == []
    assert desk.heard(FetchFailed(order.transfer_id, "lost", 2, (3,))) == []
    assert desk.copier.uploads == [((0,), (30,)), ((1,), (31,))]
    assert desk.staging.num_free == 13
    desk.copier.finish()
    # No block of the cache itself is in quarantine.
    assert desk.heard() == [FetchFailed(order.transfer_id, "lost", 2, ())]
    assert desk.staging.num_free == 15
    assert desk.heard(BlocksReleased((3,))) == []
    assert desk.staging.num_free == 16


def test_a_fetch_that_fails_with_nothing_copies_nothing() -> None:
    desk = Desk()
    order = desk.order(30)
    failed = FetchFailed(order.transfer_id, "refused", 0, (), FailureKind.REFUSED)
    assert desk.heard(failed) == [failed]
    assert desk.copier.uploads == []
    assert desk.staging.num_free == STAGING


@pytest.mark.parametrize(("coming", "kind"), [(1, FailureKind.DEADLINE), (9, FailureKind.OVERLOADED)])
def test_a_deadline_that_passed_for_want_of_staging_blocks_is_not_the_prefill_nodes(
    coming: int, kind: FailureKind
) -> None:
    desk = Desk(staging_blocks=2)
    order = desk.order(*range(30, 40))
    desk.heard(BlocksComing(order.transfer_id, coming))
    (failed,) = desk.heard(FetchFailed(order.transfer_id, "deadline", 0, (), FailureKind.DEADLINE))
    assert isinstance(failed, FetchFailed)
    assert failed.kind is kind
    assert desk.staging.num_free == 2


@pytest.mark.parametrize("stage", ["ordered", "wanting", "copying", "landed"])
def test_cancel_in_every_stage(stage: str) -> None:
    desk = Desk(staging_blocks=4)
    order = desk.order(30, 31, 32)
    transfer = order.transfer_id
    if stage != "ordered":
        desk.heard(BlocksComing(transfer, 3))
    if stage in ("copying", "landed"):
        desk.heard(BlocksLanded(transfer, 1))
    if stage == "landed":
        for landed in (BlocksLanded(transfer, 2), FetchLanded(transfer, 0.1, 1, landed=3)):
            desk.copier.finish()
            desk.heard()
            desk.heard(landed)
    desk.fetches.cancel_fetch(transfer)
    if stage == "landed":
        assert desk.thread.cancelled == []
        assert desk.heard() == []
        desk.copier.finish()
        assert desk.heard() == [FetchCancelled(transfer, ())]
        assert desk.staging.num_free == 4
        return
    assert desk.thread.cancelled == [transfer]
    assert desk.heard(BlocksComing(transfer, 3), BlocksLanded(transfer, 1)) == []
    held = (desk.thread.accepted[-1][1] if desk.thread.accepted else (0,)) if stage != "copying" else ()
    events = desk.heard(FetchCancelled(transfer, held))
    if stage == "copying":
        assert events == [], "the copy still writes to the cache's blocks"
        desk.copier.finish()
        events = desk.heard()
    assert events == [FetchCancelled(transfer, ())]
    assert desk.staging.num_free == 4 - len(held)
    desk.heard(BlocksReleased(held))
    assert desk.staging.num_free == 4
    desk.fetches.cancel_fetch(transfer)
    assert not desk.staging._holders


def test_cached_blocks_are_copied_as_far_as_the_holder_has_them() -> None:
    desk = Desk(staging_blocks=12)
    order = CachedFetchOrder(TransferId(new_id(), 0, b"boot"), TARGET, (bytes(32),) * 3, (30, 31, 32), 10.0)
    transfer = order.transfer_id
    desk.fetches.fetch(order)
    (inner,) = desk.thread.asked
    assert (inner.hashes, inner.block_ids, inner.paced_blocks) == (order.hashes, (0, 1, 2), 3)
    desk.heard(BlocksComing(transfer, 2), BlocksLanded(transfer, 1))
    landed = FetchLanded(transfer, 0.1, 100, landed=2)
    assert desk.heard(landed) == []
    assert desk.copier.uploads == [((0,), (30,)), ((1,), (31,))], "nothing is copied over the block that did not land"
    desk.copier.finish()
    assert desk.heard() == [landed]
    assert desk.staging.num_free == 12
    assert not desk.staging._holders


def test_a_fetch_of_cached_blocks_that_nobody_holds_copies_nothing() -> None:
    desk = Desk(staging_blocks=12)
    order = CachedFetchOrder(TransferId(new_id(), 0, b"boot"), TARGET, (bytes(32),) * 3, (30, 31, 32), 10.0)
    desk.fetches.fetch(order)
    landed = FetchLanded(order.transfer_id, 0.1, 0)
    assert desk.heard(landed) == [landed]
    assert (desk.copier.uploads, desk.staging.num_free) == ([], 12)


def test_offers_pass_without_staging_blocks() -> None:
    desk = Desk()
    desk.fetches.offer(TARGET, (bytes(32),), "chat-1")
    assert desk.thread.offered == [(TARGET, (bytes(32),))]
    offered = BlocksOffered(TARGET, (bytes(32),))
    assert desk.heard(offered) == [offered]


# ------------------------------------------------------------ a prefill node


def test_cached_blocks_are_sent_when_they_are_in_their_staging_blocks() -> None:
    desk = Desk(staging_blocks=12)
    wanted = CachedWanted(TransferId(new_id(), 0, b"boot"), (bytes(32),) * 3, 9.0)
    assert desk.pushed(wanted) == [wanted]
    desk.pushes.push(wanted.transfer_id, 0, (50, 51))
    desk.pushes.held(wanted.transfer_id, 2)
    assert (desk.thread.held_counts, desk.thread.pushed) == ([2], [])
    desk.copier.finish()
    desk.pushed()
    assert desk.thread.pushed == [(0, (0,)), (1, (1,))]
    ended = PushEnded(wanted.transfer_id, PushOutcome.DONE)
    assert desk.pushed(ended) == [ended]
    assert desk.push_staging.num_free == 12


def test_blocks_are_sent_when_they_are_in_their_staging_blocks() -> None:
    desk = Desk(staging_blocks=12)
    wanted = desk.wanted(3, first_block=2)
    assert desk.pushed(wanted) == [wanted], "it is computed whether or not there is host memory"
    desk.pushes.push(wanted.transfer_id, 2, (50,))
    desk.pushes.first_token(wanted.transfer_id, (SampledToken(5),), 0, UNKNOWN_LOAD)
    desk.pushes.push(wanted.transfer_id, 3, (51, 52))
    assert desk.thread.first_tokens == [5]
    assert desk.copier.downloads == [((50,), (0,)), ((51,), (1,)), ((52,), (2,))]
    assert desk.thread.pushed == []
    desk.copier.finish(1)
    desk.pushed()
    assert desk.thread.pushed == [(2, (0,))]
    desk.copier.finish()
    ended = PushEnded(wanted.transfer_id, PushOutcome.DONE)
    desk.pushed()
    assert desk.pushed(ended) == [ended]
    assert desk.thread.pushed == [(2, (0,)), (3, (1,)), (4, (2,))]
    assert desk.push_staging.num_free == 12


def test_a_prompt_of_any_length_passes_through_few_staging_blocks() -> None:
    desk = Desk(staging_blocks=2)
    wanted = desk.wanted(50)
    desk.pushed(wanted)
    desk.pushes.push(wanted.transfer_id, 0, tuple(range(100, 130)))
    desk.pushes.push(wanted.transfer_id, 30, tuple(range(130, 150)))
    for sent in range(1, 51):
        assert len(desk.copier.downloads) == sent, "no more than the staging blocks hold"
        desk.copier.finish()
        desk.pushed()
        assert len(desk.thread.pushed) == sent
        assert desk.pushed(BlocksSent(wanted.transfer_id, desk.thread.pushed[-1][1])) == []
    assert [blocks for blocks, _ in desk.copier.downloads] == [(block,) for block in range(100, 150)]
    assert [index for index, _ in desk.thread.pushed] == list(range(50))
    ended = PushEnded(wanted.transfer_id, PushOutcome.DONE)
    assert desk.pushed(ended) == [ended]
    assert desk.push_staging.num_free == 2


def test_a_short_prompt_passes_a_long_one() -> None:
    desk = Desk(staging_blocks=2)
    long, short = desk.wanted(50), desk.wanted(1)
    assert desk.pushed(long, short) == [long, short]
    desk.pushes.push(long.transfer_id, 0, tuple(range(100, 150)))
    desk.pushes.push(short.transfer_id, 0, (7,))
    assert [blocks for blocks, _ in desk.copier.downloads] == [(100,)], "one peer has half of the memory"
    for _ in range(2):
        desk.copier.finish()
        desk.pushed()
        desk.pushed(BlocksSent(long.transfer_id, (0,)))
    assert [blocks for blocks, _ in desk.copier.downloads] == [(100,), (101,), (7,)], "after one more turn"


def test_a_push_to_a_peer_that_takes_nothing_keeps_no_other_peer_waiting() -> None:
    desk = Desk(staging_blocks=2)
    stuck, other = desk.wanted(50), desk.wanted(5, boot=b"other")
    desk.pushed(stuck, other)
    desk.pushes.push(stuck.transfer_id, 0, tuple(range(100, 150)))
    desk.pushes.push(other.transfer_id, 0, (1, 2, 3, 4, 5))
    for _ in range(5):
        desk.copier.finish()
        desk.pushed()
        desk.pushed(BlocksSent(other.transfer_id, desk.thread.pushed[-1][1]))
    assert [blocks for blocks, _ in desk.copier.downloads if blocks[0] < 100] == [(1,), (2,), (3,), (4,), (5,)]


def test_a_push_that_ends_under_a_copy_is_over_after_it() -> None:
    desk = Desk(staging_blocks=12)
    wanted = desk.wanted(4)
    desk.pushed(wanted)
    desk.pushes.push(wanted.transfer_id, 0, (50,))
    desk.copier.finish()
    desk.pushed()
    desk.pushes.push(wanted.transfer_id, 1, (51, 52, 53))
    assert len(desk.copier.downloads) == 3, "the last one waits for a staging block"
    cancelled, ended = PushCancelled(wanted.transfer_id), PushEnded(wanted.transfer_id, PushOutcome.CANCELLED)
    assert desk.pushed(cancelled, ended) == [cancelled]
    desk.pushes.push(wanted.transfer_id, 4, (54,))
    assert len(desk.copier.downloads) == 3
    assert desk.push_staging.num_free == 10, "what was sent is not read any more"
    desk.copier.finish(1)
    assert desk.pushed() == []
    desk.copier.finish(1)
    assert desk.pushed() == [ended]
    assert desk.thread.pushed == [(0, (0,))]
    assert desk.push_staging.num_free == 12


def test_a_push_that_ends_before_anything_is_computed() -> None:
    desk = Desk()
    wanted = desk.wanted(2)
    ends = PushCancelled(wanted.transfer_id), PushEnded(wanted.transfer_id, PushOutcome.CANCELLED)
    assert desk.pushed(wanted, *ends) == [wanted, *ends]
    desk.pushes.push(wanted.transfer_id, 0, (1, 2))
    assert desk.copier.downloads == []


def test_copies_that_have_ended_for_ever_end_the_engine() -> None:
    desk = Desk()
    desk.copier.failure = "RuntimeError: no such device"
    assert desk.heard() == [TransferThreadDied("RuntimeError: no such device")]
    assert desk.pushed() == [TransferThreadDied("RuntimeError: no such device")]


class Wire:
    """The transfers in one direction between two nodes with few staging blocks, and their threads' messages."""

    def __init__(self, prefill: Desk, decode: Desk, random: Random) -> None:
        self.prefill, self.decode = prefill, decode
        self.random = random
        self.ready: dict[TransferId, int] = {}
        self.sent: dict[TransferId, int] = {}
        self.orders: list[FetchOrder] = []

    def start(self, blocks: int) -> None:
        order = self.decode.order(*range(blocks))
        transfer = order.transfer_id
        self.orders.append(order)
        self.ready[transfer] = self.sent[transfer] = 0
        wanted = PushWanted(transfer, order.token_ids, 0, SAMPLING, 9.0)
        self.prefill.pushed(wanted)

    def compute(self) -> None:
        """Computes all prompts, in any order."""
        for order in self.random.sample(self.orders, len(self.orders)):
            self.prefill.pushes.push(order.transfer_id, 0, order.block_ids)

    def turn(self) -> bool:
        """Moves each block that has a staging block and is accepted. Returns whether any block moved."""
        before = (list(self.sent.values()), len(self.done))
        self.prefill.copier.finish()
        self.decode.copier.finish()
        self.prefill.pushed()
        self.decode.heard()
        for order in self.orders:
            self._move(order)
        return before != (list(self.sent.values()), len(self.done))

    def _move(self, order: FetchOrder) -> None:
        transfer = order.transfer_id
        pushed = self.prefill.thread.pushed_of(transfer)
        if len(pushed) > self.ready[transfer]:
            self.ready[transfer] = len(pushed)
            self.decode.heard(BlocksComing(transfer, len(pushed)))
        moved = min(len(pushed), self.decode.thread.accepted_of(transfer))
        if moved > self.sent[transfer]:
            self.prefill.pushed(BlocksSent(transfer, tuple(pushed[self.sent[transfer] : moved])))
            self.sent[transfer] = moved
            self.decode.heard(BlocksLanded(transfer, moved))

    @property
    def done(self) -> list[TransferId]:
        return [order.transfer_id for order in self.orders if self.sent[order.transfer_id] == len(order.block_ids)]


@settings(deadline=None)
@given(
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_transfers_that_hold_some_staging_blocks_each_never_wait_for_each_other(
    staged: tuple[int, int], lengths: list[int], random: Random
) -> None:
    """An early transfer may hold staging blocks on the decode node while it waits for those of the prefill node."""
    wire = Wire(Desk(staged[0]), Desk(staged[1]), random)
    for length in lengths:
        wire.start(length)
    wire.compute()
    while len(wire.done) < len(lengths):
        assert wire.turn(), "all wait for each other"
    wire.turn()
    assert wire.decode.staging.num_free == staged[1]


@settings(deadline=None)
@given(
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_two_nodes_that_fetch_from_each_other_never_wait_for_each_other(
    staged: tuple[int, int], lengths: list[int], random: Random
) -> None:
    """If fetches and pushes shared staging blocks, both nodes' pushes could hold all, and no fetch could land."""
    one, other = Desk(staged[0]), Desk(staged[1])
    wires = Wire(one, other, random), Wire(other, one, random)
    for length in lengths:
        random.choice(wires).start(length)
    for wire in wires:
        wire.compute()
    while sum(len(wire.done) for wire in wires) < len(lengths):
        moved = [wire.turn() for wire in wires]
        assert any(moved), "all wait for each other"
    for wire in wires:
        wire.turn()
    assert (one.staging.num_free, other.staging.num_free) == staged
