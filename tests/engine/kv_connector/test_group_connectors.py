"""Tests what connectors move of a model with a window and a state, and that nobody goes on from a part of that."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.kv_cache.block_table import NONE, BlockTable, StateTable
from pdserve.engine.request import Request, Status
from pdserve.wire.cache_groups import GroupSpec, Keep, laid_out, moved_blocks
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.events import (
    BlocksOffered,
    BlocksReleased,
    CachedFetchOrder,
    CachedWanted,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    PushEnded,
    PushOutcome,
    PushWanted,
)
from tests.engine.kv_connector.test_connectors import BLOCK_SIZE, NUM_BLOCKS, Bench
from tests.engine.kv_connector.test_returns import Decoding
from tests.engine.kv_connector.test_reuse import Resumes, hashes

WHOLE = GroupSpec("all", Keep.ALL, 1, 1, 64, "bf16")
WINDOW = GroupSpec("window 6", Keep.WINDOW, 1, 1, 64, "bf16", 6)
STATE = GroupSpec("state", Keep.LATEST, 1, 1, 64, "fp32")
SPECS = (WHOLE, WINDOW, STATE)
GROUPS, _ = laid_out(SPECS, (NUM_BLOCKS, 24, 24), (64, 64, 64))
HOLDER = PrefillTarget("h", "tcp://127.0.0.1:1", new_id())


def state_of(request: Request) -> StateTable:
    held = request.block_table.others[1]
    assert isinstance(held, StateTable)
    return held


def fetching() -> tuple[Bench, Request, FetchOrder]:
    """Returns a fetch of a prompt of three blocks, of whose last two the window has something."""
    bench = Bench(groups=GROUPS)
    request = bench.request()
    bench.step()
    (order,) = bench.thread.fetched
    return bench, request, order


def test_a_fetch_asks_for_what_the_next_token_needs_of_each_group() -> None:
    _, request, order = fetching()
    moved = moved_blocks(SPECS, BLOCK_SIZE, 0, 10)
    assert [(block.group, block.number) for block in moved] == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0)]
    assert order.block_ids == request.block_table.blocks_of(moved)
    assert [order.block_ids[i] in GROUPS[block.group].ids for i, block in enumerate(moved)] == [True] * 6
    assert NONE not in order.block_ids


def test_an_answer_goes_on_from_what_has_landed() -> None:
    bench, request, order = fetching()
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(9),), 0))
    bench.report(FetchLanded(order.transfer_id, 0.1, 100, landed=len(order.block_ids)))
    assert (request.status, request.num_computed_tokens) == (Status.RUNNING, 10)
    assert state_of(request).present == order.block_ids[-1]
    (work,) = bench.step().work
    assert (work.request, work.num_tokens) == (request, 1)
    bench.scheduler.abort(request)
    assert bench.all_free


@pytest.mark.parametrize("landed", [0, 3, 5, 6])
def test_a_part_is_of_no_use_and_neither_is_all_without_the_first_token(landed: int) -> None:
    bench, request, order = fetching()
    late = order.block_ids[landed:]
    bench.report(FetchFailed(order.transfer_id, "gone", landed, late, FailureKind.PEER_LOST))
    assert request.num_computed_tokens == 0
    assert not set(late) & set(request.block_table.every_block())
    assert bench.blocks.num_quarantined == len(late)
    (work,) = bench.step().work
    assert (work.request, work.num_tokens) == (request, 8)
    assert not set(late) & set(request.block_table.every_block())
    bench.report(BlocksReleased(late))
    bench.scheduler.abort(request)
    assert bench.all_free


def test_all_with_the_first_token_is_enough_though_the_prefill_node_is_lost() -> None:
    bench, request, order = fetching()
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(9),), 0))
    bench.report(FetchFailed(order.transfer_id, "gone", len(order.block_ids), (), FailureKind.PEER_LOST))
    assert request.num_computed_tokens == 10
    assert state_of(request).present == order.block_ids[-1]


def test_what_was_there_before_is_there_after_a_failed_fetch() -> None:
    bench = Bench(groups=GROUPS)
    first = bench.request(prompt=10, targets=0)
    bench.step()
    bench.step()
    bench.scheduler.abort(first)
    second = bench.request(prompt=14)
    bench.step()
    (order,) = bench.thread.fetched
    assert (order.first_block, second.num_computed_tokens) == (2, 8)
    present = state_of(second).present
    assert order.block_ids == second.block_table.blocks_of(moved_blocks(SPECS, BLOCK_SIZE, 2, 14))
    assert present not in order.block_ids
    bench.report(FetchFailed(order.transfer_id, "gone", 1, (), FailureKind.PEER_LOST))
    assert second.num_computed_tokens == 8
    assert state_of(second).present == present
    (work,) = bench.step().work
    assert (work.request, work.num_tokens) == (second, 4)
    bench.scheduler.abort(second)
    assert bench.all_free


def test_a_cancelled_fetch_gives_the_blocks_of_all_groups_back_when_nothing_writes_them() -> None:
    bench, request, order = fetching()
    bench.scheduler.abort(request)
    assert bench.thread.cancelled == [order.transfer_id]
    assert not bench.all_free
    state = order.block_ids[-1:]
    bench.report(FetchCancelled(order.transfer_id, state))
    assert [pool.num_free for pool in bench.blocks.pools] == [NUM_BLOCKS, 24, 23]
    bench.report(BlocksReleased(state))
    assert bench.all_free


def test_a_prompt_leaves_chunk_by_chunk_and_its_state_last() -> None:
    bench = Bench(groups=GROUPS)
    transfer = TransferId(new_id(), 0, b"other")
    bench.report(PushWanted(transfer, [7] * 10, 0, SamplingParams(max_tokens=1, seed=1), 30.0))
    (request,) = bench.scheduler.live()
    bench.step()
    assert [len(blocks) for _, blocks in bench.thread.pushed] == [3]
    bench.step()
    assert [first for first, _ in bench.thread.pushed] == [0, 3]
    moved = moved_blocks(SPECS, BLOCK_SIZE, 0, 10)
    assert tuple(bench.thread.pushed_of(transfer)) == request.block_table.blocks_of(moved)
    assert bench.thread.pushed_of(transfer)[-1] == state_of(request).present
    assert bench.thread.first_tokens == [50]
    bench.report(PushEnded(transfer, PushOutcome.DONE))
    assert bench.all_free


def test_a_fetch_of_offered_blocks_makes_way_for_a_request_that_needs_their_states() -> None:
    bench = Bench(groups=GROUPS)
    names = hashes([7] * 16)
    offer = BlocksOffered(HOLDER, names[:2], "")
    bench.report(offer)
    (order,) = bench.thread.asked
    taken: list[BlockTable] = []
    while bench.blocks.pools[2].num_free > 1:
        taken.append(BlockTable())
        assert bench.blocks.grow_bounded(taken[-1], 0, 1)
    request = bench.request(prompt=10, targets=0)
    bench.report()
    assert bench.thread.cancelled == [order.transfer_id]
    bench.report(FetchCancelled(order.transfer_id, ()))
    bench.report(offer)
    assert bench.thread.asked == [order], "too few states are left for the request"
    for table in taken:
        bench.blocks.free(table)
    bench.scheduler.abort(request)
    assert bench.all_free


def computed(bench: Bench, prompt: int) -> None:
    """Leaves a prompt in the prefix cache."""
    request = bench.request(prompt=prompt, targets=0)
    while not request.num_generated_tokens:
        bench.step()
    bench.scheduler.abort(request)


def wanted(bench: Bench, names: tuple[bytes, ...]) -> TransferId:
    transfer = TransferId(new_id(), 0, b"other")
    bench.report(CachedWanted(transfer, names, 9.0))
    return transfer


def test_a_holder_gives_blocks_with_what_all_groups_have_behind_them_or_says_how_many_it_could() -> None:
    bench = Bench(groups=GROUPS)
    computed(bench, 14)
    names = hashes([7] * 16)
    transfer = wanted(bench, names[:3])
    assert (bench.thread.held_counts, bench.thread.usable) == ([3], [0])
    assert len(bench.thread.pushed_of(transfer)) == len(moved_blocks(SPECS, BLOCK_SIZE, 0, 12))
    bench.report(PushEnded(transfer, PushOutcome.DONE))
    longer = wanted(bench, names[:4])
    assert (bench.thread.held_counts, bench.thread.usable) == ([3, 0], [0, 3])
    assert bench.thread.pushed_of(longer) == []
    bench.report(PushEnded(longer, PushOutcome.DONE))
    assert bench.all_free


def test_a_holder_keeps_half_of_each_group_for_live_requests() -> None:
    bench = Bench(groups=GROUPS)
    computed(bench, 14)
    pool = bench.blocks.pools[2]
    taken = [bench.blocks._take(pool) for _ in range(len(pool.free))]
    wanted(bench, hashes([7] * 12))
    assert (bench.thread.held_counts, bench.thread.usable) == ([0], [0])
    assert taken


class GroupResumes(Resumes):
    def __init__(self) -> None:
        super().__init__(groups=GROUPS)


def test_a_resumed_answer_asks_again_for_as_many_blocks_as_its_holder_has_a_state_behind() -> None:
    bench = GroupResumes()
    request = bench.resume()
    bench.step()
    order = bench.last_order
    assert order.hashes == hashes(request.token_ids)[:4]
    assert order.block_ids == request.block_table.blocks_of(moved_blocks(SPECS, BLOCK_SIZE, 0, 16))
    bench.report(FetchLanded(order.transfer_id, 0.1, 0, landed=0, usable=3))
    again = bench.last_order
    assert (again.hashes, request.status) == (order.hashes[:3], Status.WAITING_FOR_REMOTE_KVS)
    assert again.transfer_id != order.transfer_id
    assert again.block_ids == request.block_table.blocks_of(moved_blocks(SPECS, BLOCK_SIZE, 0, 12))
    bench.report(FetchLanded(again.transfer_id, 0.1, 0, landed=len(again.block_ids)))
    assert (request.num_computed_tokens, state_of(request).present) == (12, again.block_ids[-1])
    assert bench.blocks.usable_prefix(order.hashes, 3) == 3, "it can be given to others"
    (work,) = bench.step().work
    assert (work.request, work.replays) == (request, True)
    bench.scheduler.abort(request)
    assert bench.all_free


@pytest.mark.parametrize("usable", [0, 2])
def test_a_holder_is_asked_twice_at_most(usable: int) -> None:
    bench = GroupResumes()
    request = bench.resume()
    bench.step()
    for _ in range(2 if usable else 1):
        bench.report(FetchLanded(bench.last_order.transfer_id, 0.1, 0, landed=0, usable=usable))
    assert (request.status, request.num_computed_tokens) == (Status.WAITING, 0)
    (work,) = bench.step().work
    assert (work.request, work.num_tokens) == (request, 4), "a chunk ends where a state is kept"
    bench.scheduler.abort(request)
    assert bench.all_free


def test_a_holder_that_is_lost_leaves_nothing_of_a_part() -> None:
    bench = GroupResumes()
    request = bench.resume()
    bench.step()
    late = bench.last_order.block_ids[2:]
    bench.report(FetchFailed(bench.last_order.transfer_id, "gone", 2, late, FailureKind.PEER_LOST))
    assert (request.num_computed_tokens, bench.blocks.num_quarantined) == (0, len(late))
    bench.report(BlocksReleased(late))
    bench.scheduler.abort(request)
    assert bench.all_free


def returned(bench: Bench, count: int) -> CachedFetchOrder:
    """Has a text of so many blocks offered to a bench. Returns the order for it."""
    bench.report(BlocksOffered(HOLDER, hashes([7] * 4 * count)))
    return bench.thread.asked[-1]


def test_a_returned_text_is_found_with_its_window_and_state() -> None:
    bench = Bench(groups=GROUPS)
    order = returned(bench, 2)
    assert len(order.block_ids) == len(moved_blocks(SPECS, BLOCK_SIZE, 0, 8))
    bench.report(FetchLanded(order.transfer_id, 0.1, 0, landed=len(order.block_ids)))
    assert bench.blocks.usable_prefix(order.hashes, 2) == 2
    assert bench.connector.returns().blocks_returned == 2
    assert bench.all_free
    request = bench.request(prompt=12, targets=0)
    (work,) = bench.step().work
    assert (work.request, request.num_computed_tokens) == (request, 12)
    assert request.facts.cached_tokens == 8


def test_of_a_returned_text_as_much_is_fetched_as_its_holder_has_a_state_behind() -> None:
    bench = Bench(groups=GROUPS)
    order = returned(bench, 2)
    bench.report(FetchLanded(order.transfer_id, 0.1, 0, landed=0, usable=1))
    again = bench.thread.asked[-1]
    assert (again.hashes, len(bench.thread.asked)) == (order.hashes[:1], 2)
    bench.report(FetchFailed(again.transfer_id, "gone", 1, (), FailureKind.PEER_LOST))
    assert bench.blocks.usable_prefix(order.hashes, 1) == 0
    assert bench.all_free


class GroupDecoding(Decoding):
    def __init__(self) -> None:
        super().__init__(groups=GROUPS)


def test_the_last_offer_ends_where_the_newest_state_stands() -> None:
    """Running answers offer what ends at a kept state alone, because each offer moves a state."""
    bench: Any = GroupDecoding()
    bench.blocks.spacing = 100
    request = bench.begin()
    bench.turn(12)
    running = list(bench.offers)
    blocks = request.num_computed_tokens // BLOCK_SIZE
    bench.scheduler.abort(request)
    assert max(running, default=0) < blocks
    assert bench.offers[-1] == blocks
    _, names = bench.thread.offered[-1]
    assert bench.blocks.usable_prefix(names, len(names)) == len(names)


def test_offers_end_where_a_state_is_kept() -> None:
    bench: Any = GroupDecoding()
    bench.begin()
    for _ in range(12):
        bench.turn()
        for _, names in bench.thread.offered:
            assert bench.blocks.usable_prefix(names, len(names)) == len(names)
    assert bench.offers == sorted(set(bench.offers)) and bench.offers[-1] >= 3
