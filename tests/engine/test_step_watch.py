"""Tests what an engine counts of steps with prompts beside requests that decode."""

from __future__ import annotations

import math

import pytest

from pdserve.config import Batching, TargetsConfig
from pdserve.engine.placement.latency_targets import LatencyTargets
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan, Work
from pdserve.engine.step_loop import FIRST_STEP_S, LONGER, StepWatch
from pdserve.wire.discovery import Role
from pdserve.wire.engine import STEP_TOKEN_BOUNDS
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import RequestTargets
from tests.terms import change_terms, made_terms


def request(known: int, computed: int, prompt: int | None = None) -> Request:
    return Request(
        uuid=new_id(),
        token_ids=[5] * known,
        num_prompt_tokens=known if prompt is None else prompt,
        sampling=SamplingParams(max_tokens=4, seed=0),
        arrived=0.0,
        terms=made_terms(100.0),
        num_computed_tokens=computed,
    )


def watch(target_itl_ms: float, role: Role = Role.MIXED) -> tuple[StepWatch, StepCost]:
    step_cost = StepCost()
    return StepWatch(step_cost, LatencyTargets(TargetsConfig(0.0, target_itl_ms), step_cost, role)), step_cost


DECODING = Work(request(21, 20, prompt=20), 1)
SHORT = Work(request(1, 0), 1)
CHUNK = Work(request(64, 16), 16)


def test_only_chunks_beside_requests_that_decode_share_a_step() -> None:
    steps, _ = watch(50)
    steps.note(BatchPlan([DECODING]), 0.2, 1.0)
    steps.note(BatchPlan([CHUNK]), 0.2, 2.0)
    steps.note(BatchPlan([SHORT, CHUNK]), 0.2, 2.5)
    assert (steps.stats().shared, steps.stats().shared_late) == (0, 0)
    steps.note(BatchPlan([DECODING, CHUNK]), 0.049, 3.0)
    steps.note(BatchPlan([DECODING, CHUNK]), 0.051, 4.0)
    stats = steps.stats()
    assert (stats.shared, stats.shared_prompt_tokens, stats.shared_late) == (2, 32, 1)
    assert stats.itl_target_s == pytest.approx(0.05)
    assert set(stats.parts) == set(StepCost().parts)


def test_a_step_is_late_by_the_target_of_the_request_that_waits_for_it() -> None:
    steps, _ = watch(50)
    hasty = request(21, 20, prompt=20)
    change_terms(hasty, own_targets=RequestTargets(itl_ms=30))
    steps.note(BatchPlan([DECODING, Work(hasty, 1), CHUNK]), 0.04, 1.0)
    steps.note(BatchPlan([DECODING, CHUNK]), 0.04, 2.0)
    assert (steps.stats().shared, steps.stats().shared_late) == (2, 1)


def test_each_step_is_counted_by_its_tokens() -> None:
    steps, _ = watch(0)
    for work in ([DECODING], [DECODING] * 9, [CHUNK, DECODING], [SHORT], [Work(request(40_000, 0), 20_000)]):
        steps.count(BatchPlan(work))
    stats = steps.stats()
    by_bound = dict(zip([*STEP_TOKEN_BOUNDS, math.inf], stats.num_tokens, strict=True))
    assert {bound: count for bound, count in by_bound.items() if count} == {1: 2, 16: 1, 32: 1, math.inf: 1}
    assert stats.tokens == 1 + 9 + 17 + 1 + 20_000
    # What decodes is no prompt, and a prompt of one token is one.
    assert stats.computed_prompt_tokens == 16 + 1 + 20_000


def test_without_a_target_no_step_is_late() -> None:
    steps, _ = watch(0)
    steps.note(BatchPlan([DECODING, CHUNK]), 10.0, 1.0)
    assert (steps.stats().shared, steps.stats().shared_late, steps.stats().itl_target_s) == (1, 0, 0.0)


def test_a_static_batch_has_no_target() -> None:
    step_cost = StepCost()
    targets = LatencyTargets(TargetsConfig(0.0, 50), step_cost, Role.DECODE, Batching.STATIC)
    steps = StepWatch(step_cost, targets)
    steps.note(BatchPlan([DECODING, CHUNK]), 10.0, 1.0)
    assert (steps.stats().shared, steps.stats().shared_late, steps.stats().itl_target_s) == (1, 0, 0.0)


def test_a_decode_node_shows_the_target_that_it_has_measured() -> None:
    steps, _ = watch(0, Role.DECODE)
    steps.note(BatchPlan([DECODING]), 0.02, 1.0)
    assert steps.stats().itl_target_s == 0.0
    steps.note(BatchPlan([DECODING]), 0.02, 2.0)
    assert steps.stats().itl_target_s == pytest.approx(0.04)


def test_the_cost_is_learned_with_what_each_token_reads() -> None:
    steps, step_cost = watch(0)
    for at, before in enumerate((0, 4096, 0, 4096)):
        chunk = Work(request(8192, before), 256)
        steps.note(BatchPlan([chunk]), 0.256 if before == 0 else 0.512, float(at))
    assert step_cost.measured_at == 3.0
    early_s, late_s = (step_cost.estimate_s(0, 0, 256, prompt_context=before) for before in (0, 4096))
    assert late_s > 1.2 * early_s


def test_a_step_may_be_silent_for_longer_than_steps_like_it_took() -> None:
    steps, cost = watch(50)
    plan = BatchPlan([DECODING, CHUNK])
    assert steps.expected_s(plan) == FIRST_STEP_S
    steps.note(plan, 0.2, 1.0)
    assert steps.expected_s(plan) == pytest.approx(LONGER * (cost.decode_step_s + cost.prompt_s(16, 16)))
    assert steps.expected_s(BatchPlan([DECODING])) == FIRST_STEP_S
    steps.note(BatchPlan([DECODING]), 0.1, 2.0)
    assert steps.expected_s(BatchPlan([DECODING])) == pytest.approx(LONGER * cost.decode_step_s)


def test_the_first_step_of_its_kind_may_take_what_its_tokens_say() -> None:
    """A slow machine has shown by smaller steps that a large one takes minutes."""
    steps, cost = watch(0)
    for at in range(4):
        steps.note(BatchPlan([Work(request(8192, 0), 128)]), 64.0, float(at))
    plan = BatchPlan([Work(request(8192, 0), 512)])
    expected_s = LONGER * cost.prompt_s(512, 0)
    assert expected_s > FIRST_STEP_S
    assert steps.expected_s(plan) == pytest.approx(expected_s)


def test_a_step_of_several_ranks_may_wait_for_them() -> None:
    step_cost = StepCost()
    steps = StepWatch(step_cost, LatencyTargets(TargetsConfig(), step_cost, Role.MIXED), ranks_s=10.0)
    assert steps.expected_s(BatchPlan([CHUNK])) == FIRST_STEP_S + 10.0
