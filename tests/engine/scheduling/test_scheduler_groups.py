"""Tests the scheduler of a model that has cache groups behind that of whole contexts."""

from __future__ import annotations

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
