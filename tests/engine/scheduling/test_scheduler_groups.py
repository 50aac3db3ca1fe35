"""Tests the scheduler of a model that has cache groups behind that of whole contexts."""

from __future__ import annotations

import pytest

from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.request import Status
from pdserve.wire.cache_groups import Keep
from pdserve.wire.engine import FinishReason
from tests.engine.fake_model import groups_of
from tests.engine.scheduling.test_scheduler import TARGET, Bench, expected


def test_a_fetch_gets_blocks_that_a_failed_fetch_of_a_later_request_has_kept() -> None:
    """There are three blocks of the window, and each prompt brings two of them."""
    bench = Bench(groups=groups_of([(Keep.WINDOW, 6, 3)], 32))
    bench.now = 9.0
    later = bench.add(1, prompt=10, targets=(TARGET,))
    assert bench.step().fetches == [later]
    bench.scheduler.requeue(later, computed_tokens=0)
    bench.now = 0.0
    first = bench.add(2, prompt=10, targets=(TARGET,))
    assert bench.step().fetches == [first]
    assert not later.block_table
    assert later.status is Status.WAITING


def test_what_a_step_without_finite_logits_has_written_is_not_given_back_before_it_is_cleared() -> None:
    """The prompt is longer than the window: its first blocks are behind that at the end of the step."""
    bench = Bench(groups=groups_of([(Keep.WINDOW, 6, 8)], 32))
    request = bench.add(1, prompt=16)
    plan = bench.scheduler.schedule(1.0)
    held = {*request.block_table.every_block()}
    assert len(held) == 4 + 4
    assert bench.scheduler.postprocess(plan, [None], 1.0) == [request]
    assert [len(pool.cache) for pool in bench.blocks.pools] == [0, 0]
    bench.blocks.taint_context(request.block_table, request.block_hashes)
    bench.scheduler.finish(request, FinishReason.ERROR, "no")
    cleared: list[int] = []
    bench.blocks.clean(cleared.extend)
    assert {*cleared} == held
    assert all(pool.num_free == len(pool.ids) for pool in bench.blocks.pools)


def taken_states(bench: Bench, count: int) -> BlockTable:
    """Takes states as the push of a cached state does, which no request holds."""
    table = BlockTable()
    for _ in range(count):
        other = BlockTable()
        assert bench.blocks.grow_bounded(other, 0, 1)
        table.extend(other.every_block())
    return table


def most_at_once(bench: Bench) -> int:
    """Computes all requests, and returns how many a step had at most. None may have been preempted."""
    most = 0
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        most = max(most, len(bench.step().work))
    assert bench.scheduler.counters.preemptions == 0
    return most


@pytest.mark.parametrize("quarantined", [False, True])
@pytest.mark.parametrize(("taken", "at_once"), [(0, 3), (1, 2), (2, 2), (3, 1)])
def test_states_in_quarantine_or_on_their_way_to_others_leave_room_for_fewer_requests(
    taken: int, at_once: int, quarantined: bool
) -> None:
    bench = Bench(groups=groups_of([(Keep.LATEST, 0, 6)], 32))
    held = taken_states(bench, taken)
    if quarantined:
        bench.blocks.quarantine(held)
    for local_id in range(3):
        bench.add(local_id, prompt=6, max_tokens=9)
    assert most_at_once(bench) == at_once
    assert bench.outputs == dict.fromkeys(range(3), expected(6, 9))
    if quarantined:
        bench.blocks.end_quarantine(held)
    else:
        bench.blocks.free(held)
    assert all(pool.num_free == len(pool.ids) for pool in bench.blocks.pools)


def test_a_cached_window_that_is_pushed_and_used_counts_once() -> None:
    """The window has room for two requests of six blocks. The push shares what the first one holds."""
    bench = Bench(max_num_batched_tokens=8, groups=groups_of([(Keep.WINDOW, 8, 4 + 4 + 2)], 32))
    first = bench.add(1, prompt=8, max_tokens=6)
    bench.step()
    shared: list[int] = []
    bench.blocks.share(shared, first.block_table.bounded_blocks())
    second = bench.add(2, prompt=6, max_tokens=6)
    assert bench.step().work
    assert (first.status, second.status) == (Status.RUNNING, Status.RUNNING)
    bench.blocks.free(shared)


def test_requests_that_the_smallest_group_cannot_hold_together_come_one_after_another() -> None:
    bench = Bench(groups=groups_of([(Keep.LATEST, 0, 3)], 32))
    for local_id in range(3):
        bench.add(local_id, prompt=6, max_tokens=9)
    most = 0
    while len(bench.endings) < 3:
        most = max(most, len(bench.step().work))
    assert most == 1
    assert bench.scheduler.counters.preemptions == 0
    assert bench.outputs == dict.fromkeys(range(3), expected(6, 9))
