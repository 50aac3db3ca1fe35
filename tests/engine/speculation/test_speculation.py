"""Tests how many drafts a step has, with a fake model and costs that are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.config import Batching, SchedulerConfig, Speculate
from pdserve.engine.kv_cache.block_manager import MOST_PASSING
from pdserve.engine.kv_cache.block_table import StateTable
from pdserve.engine.placement.step_cost import StepCost, StepParts
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import REPLAY_ROWS, BatchPlan
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.speculation.guesses import FIRST_RATES, OwnText, PromptText, Rates
from pdserve.engine.speculation.speculation import LEAST_CHANCE, LEAST_READ, Speculation
from pdserve.wire.cache_groups import Keep
from pdserve.wire.discovery import Role
from pdserve.wire.sampling_params import SampledToken
from tests.engine.fake_model import groups_of
from tests.engine.placements import make_placement
from tests.engine.scheduling.test_scheduler import BLOCK_SIZE, EOS, Bench, expected

MOST = SchedulerConfig().draft_tokens
STEP_S, ROW_S = 0.010, 0.001
STATES = groups_of([(Keep.LATEST, 0, 32)], 32)


def parts(step_s: float = STEP_S, row_s: float = ROW_S) -> StepParts:
    """Returns the cost of steps on a machine where a row takes little beside the step."""
    return StepParts(
        batch=step_s,
        request=row_s,
        context_token=0.0,
        chunk_alone=0.0,
        chunk_beside=0.0,
        prompt_token=0.001,
        prompt_token_read=0.0,
    )


class Guessing(OwnText):
    """Guesses what ``Bench`` answers, and something else behind the first ``right`` tokens."""

    def __init__(self, rate: float, right: int) -> None:
        super().__init__(Rates(FIRST_RATES), PromptText(0))
        self.matched, self._rate, self._right = 16, rate, right

    def read(self, tokens: Sequence[int], num_prompt_tokens: int, most: int) -> int:
        return 0

    def rate(self, number: int = 0) -> float:
        return self._rate

    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        return [(10 if number < self._right else 9) + len(tokens) + number for number in range(count)]


class After:
    """The tokens after drafts, as ``Bench`` answers."""

    def after(self, request: Request, number: int) -> SampledToken:
        return SampledToken(10 + len(request.token_ids))

    def are_finite(self, request: Request) -> bool:
        return True


class Drafting(Bench):
    """Has each request guess, at so high a rate."""

    def __init__(
        self,
        rate: float = 0.95,
        right: int = MOST,
        cost: StepParts | None = None,
        target_itl_ms: float = 0.0,
        scheduler: SchedulerConfig | None = None,
        **more: object,
    ) -> None:
        step_cost = StepCost.of(cost or parts(), 32)
        placement = make_placement(BLOCK_SIZE, step_cost=step_cost, target_itl_ms=target_itl_ms, role=Role.DECODE)
        super().__init__(placement=placement, **more)  # type: ignore[arg-type]
        self._rate, self._right = rate, right
        if scheduler is not None:
            stop = StopRule(frozenset({EOS}), 64)
            self.scheduler.speculation = Speculation(
                scheduler, self.scheduler.speculation._blocks, stop, step_cost, placement.targets, by_model=False
            )

    def step(self) -> BatchPlan:
        for request in self.scheduler.live():
            request.own_text = request.own_text or Guessing(self._rate, self._right)
        self.now += 1
        plan = self.scheduler.schedule(self.now)
        tokens = [SampledToken(10 + len(request.token_ids)) for request in plan.sampled_requests]
        self.scheduler.postprocess(plan, tokens, self.now, After())
        self.collect()
        return plan

    def drafted(self) -> list[int]:
        """Returns how many drafts each request has in the next step."""
        return [len(work.drafts) for work in self.step().work]


def started(bench: Drafting, *, requests: int = 1, prompt: int = 5, max_tokens: int = 40) -> Drafting:
    """Returns the bench with requests that decode."""
    for local_id in range(requests):
        bench.add(local_id, prompt, max_tokens)
    while bench.scheduler.num_waiting or any(not live.num_generated_tokens for live in bench.scheduler.live()):
        bench.step()
    return bench


@pytest.mark.parametrize("right", [0, 1, 3, MOST], ids=["none is right", "the first", "three", "all"])
@pytest.mark.parametrize("groups", [(), (Keep.WINDOW,), (Keep.LATEST,)], ids=["whole", "window", "state"])
def test_an_answer_is_the_same_in_fewer_steps_if_drafts_are_right(right: int, groups: tuple[Keep, ...]) -> None:
    """Nothing is computed again: each step after the prompt's gives the tokens of its right drafts and one more."""
    specs = groups_of([(keep, 6, 32) for keep in groups], 64) if groups else ()
    bench = Drafting(right=right, num_blocks=64, groups=specs)
    bench.add(1, prompt=5, max_tokens=33)
    steps = 0
    while (plan := bench.step()).work:
        steps += 1
        assert [work.num_tokens for work in plan.work] == [5 if steps == 1 else 1]
        tables = [table for request in bench.scheduler.live() for table in request.block_table.others]
        assert not any(table.drafted for table in tables if isinstance(table, StateTable))
    assert bench.outputs == {1: expected(5, 33)}
    assert steps == 1 + 32 // (1 + right)
    counts = bench.scheduler.counters
    assert counts.accepted_drafts == 33 - steps
    assert counts.drafts > 20
    assert all(pool.num_free == len(pool.ids) for pool in bench.blocks.pools)


@pytest.mark.parametrize(("target_itl_ms", "most"), [(0.0, 400), (14.0, 160), (8.0, LEAST_READ)])
def test_a_draft_model_reads_for_about_a_step_and_within_the_target(target_itl_ms: float, most: int) -> None:
    bench = started(Drafting(target_itl_ms=target_itl_ms, cost=parts(row_s=0.0)))
    speculation, requests = bench.scheduler.speculation, list(bench.scheduler.live())
    assert speculation.may_read(requests) == LEAST_READ
    speculation.drafted_for(4, 0.008)
    # What it has drafted took 8 ms as well.
    speculation.drafted_for(4, 0.018, num_read=400)
    assert speculation.may_read(requests) == most
    # It is not taken for slow because it has read.
    speculation.drafted_for(1, 1.0, num_read=40)
    assert speculation._draft_s == 0.002
    speculation.drafted_for(4, 0.004, num_read=40)
    assert speculation._draft_s == 0.001


def test_rows_that_do_not_pay_are_not_added() -> None:
    """Where a row takes the time of a step, as in a batch that is bound by what it computes, none pays."""
    assert started(Drafting(cost=parts(step_s=0.0))).drafted() == [0]
    assert started(Drafting()).drafted() == [MOST]


@pytest.mark.parametrize(("rate", "most"), [(0.95, MOST), (0.5, 3), (0.2, 1), (LEAST_CHANCE / 2, 0)])
def test_the_less_likely_drafts_are_the_fewer_there_are(rate: float, most: int) -> None:
    (count,) = started(Drafting(rate)).drafted()
    assert count <= most
    assert bool(count) == bool(most)


@pytest.mark.parametrize("target_itl_ms", [12.5, 14.5, 16.5])
def test_a_step_with_drafts_keeps_its_itl_target(target_itl_ms: float) -> None:
    (count,) = started(Drafting(target_itl_ms=target_itl_ms)).drafted()
    assert 1000 * (STEP_S + (1 + count) * ROW_S) <= target_itl_ms
    assert count < MOST


def test_a_step_that_is_late_already_drafts_nothing() -> None:
    assert started(Drafting(target_itl_ms=1.0)).drafted() == [0]


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_a_step_has_no_more_tokens_than_it_may(requests: int) -> None:
    bench = started(Drafting(max_num_batched_tokens=6, max_num_seqs=3, num_blocks=64), requests=requests)
    assert sum(bench.drafted()) == 6 - requests


def test_a_step_has_no_more_rows_than_are_recorded() -> None:
    bench = started(Drafting(max_num_batched_tokens=64, max_num_seqs=8, num_blocks=128), requests=6)
    assert sum(bench.drafted()) == SchedulerConfig(max_num_seqs=8).most_rows - 6


@pytest.mark.parametrize("left", [1, 2, 3, 5])
def test_nothing_is_drafted_behind_the_last_token(left: int) -> None:
    """One of the tokens that are left comes without a draft."""
    assert started(Drafting(), max_tokens=1 + left).drafted() == [left - 1]
    assert started(Drafting(max_len=5 + 1 + left)).drafted() == [left - 1]


@pytest.mark.parametrize("right", [2, MOST])
def test_a_step_that_passes_over_ends_of_blocks_leaves_the_states_there_to_be_found(right: int) -> None:
    found = []
    for bench in (Drafting(right=right, groups=STATES), Bench(groups=STATES)):
        request = bench.add(1, prompt=5, max_tokens=33)
        bench.run()
        cache = bench.blocks.pools[1].cache
        found.append([cache.block_of(block_hash) is not None for block_hash in request.block_hashes])
    assert found[0] == found[1]
    assert sum(found[0]) == MOST_PASSING


def test_without_free_blocks_for_states_there_are_fewer_drafts_and_nobody_is_preempted() -> None:
    """A quarter of the states is left, and two of them are each request's own."""

    def drafted(states: int, requests: int = 1) -> list[int]:
        bench = started(Drafting(num_blocks=64, groups=groups_of([(Keep.LATEST, 0, states)], 64)), requests=requests)
        counts = bench.drafted()
        bench.run()
        assert not bench.scheduler.counters.preemptions
        assert bench.outputs == {number: expected(5, 40) for number in range(requests)}
        assert all(pool.num_free == len(pool.ids) for pool in bench.blocks.pools)
        return counts

    assert [drafted(states) for states in (16, 8, 4, 3)] == [[MOST], [4], [1], [1]]
    assert drafted(12, requests=2) == [5, 0]


@pytest.mark.parametrize("preempted", [True, False])
def test_a_request_that_leaves_while_its_drafts_are_checked_leaves_no_block(preempted: bool) -> None:
    bench = started(Drafting(right=2, groups=STATES))
    (request,) = bench.scheduler.live()
    request.own_text = Guessing(0.95, 2)
    plan = bench.scheduler.schedule(bench.now)
    assert plan.work[0].drafts
    held = request.block_table.others[0]
    assert isinstance(held, StateTable)
    assert len(held.drafted) == len(plan.work[0].drafts)
    if preempted:
        bench.scheduler._preempt(request)
    else:
        bench.scheduler.abort(request)
    assert all(pool.num_free == len(pool.ids) for pool in bench.blocks.pools)


def test_without_a_free_block_drafts_fill_the_last_ones_and_nobody_is_preempted() -> None:
    bench = started(Drafting(num_blocks=4), requests=2, prompt=6, max_tokens=4)
    rooms = [max(0, len(one.block_table) * BLOCK_SIZE - len(one.token_ids)) for one in bench.scheduler.live()]
    assert all(drafts <= room for drafts, room in zip(bench.drafted(), rooms, strict=True))
    assert not bench.scheduler.counters.preemptions
    assert started(Drafting(num_blocks=8), requests=2, prompt=6, max_tokens=4).drafted() == [2, 2]


@pytest.mark.parametrize(
    "scheduler", [SchedulerConfig(speculation=Speculate.OFF), SchedulerConfig(batching=Batching.STATIC)]
)
def test_nothing_is_drafted_where_it_is_off_or_the_batch_static(scheduler: SchedulerConfig) -> None:
    bench = started(Drafting(scheduler=scheduler))
    assert not bench.scheduler.speculation.is_on
    assert bench.drafted() == [0]


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    bench = Bench()
    bench.add(1, prompt=12, max_tokens=8)
    bench.run()
    assert bench.scheduler.counters.drafts == 0


def test_nothing_is_drafted_behind_a_token_that_is_replayed_alone() -> None:
    """One request leaves the other a single row of the step's replayed tokens, which is not its last token."""
    bench = Drafting(max_num_batched_tokens=256, num_blocks=128, max_len=128)
    bench.add(1, prompt=5, max_tokens=80, emitted=REPLAY_ROWS - 1)
    bench.add(2, prompt=5, max_tokens=30, emitted=10)
    plans = [bench.step() for _ in range(2)]
    alone = [work for work in plans[1].work if work.replays and work.num_tokens == 1]
    assert [work.drafts for work in alone] == [()]
    bench.run()
    assert bench.outputs[2] == expected(5, 30)[10:]
