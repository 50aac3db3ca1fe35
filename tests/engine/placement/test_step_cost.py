"""Tests what an engine learns of its steps' cost."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.placement.step_cost import PRIOR_TOKEN_S, StepCost
from tests.examples import examples


@dataclass(frozen=True)
class Step:
    rows: int
    context_tokens: int
    prompt_tokens: int
    prompt_context: int

    def estimate_s(self, cost: StepCost) -> float:
        return cost.estimate_s(self.rows, self.context_tokens, self.prompt_tokens, prompt_context=self.prompt_context)

    def observe(self, cost: StepCost, seconds: float) -> None:
        cost.observe(self.rows, self.context_tokens, self.prompt_tokens, seconds, prompt_context=self.prompt_context)


@dataclass(frozen=True)
class Machine:
    """What steps take on a machine without noise."""

    batch_s: float = 0.012
    row_s: float = 0.0012
    context_s: float = 1e-6
    alone_s: float = 0.010
    beside_s: float = 0.003
    token_s: float = 0.0036
    read_s: float = 2e-7

    def seconds(self, step: Step) -> float:
        seconds = step.prompt_tokens * (self.token_s + self.read_s * step.prompt_context)
        if step.rows:
            seconds += self.batch_s + step.rows * self.row_s + step.context_tokens * self.context_s
        if step.prompt_tokens:
            seconds += self.beside_s if step.rows else self.alone_s
        return seconds


def steps_of(number: int, seed: int = 1) -> list[Step]:
    """Returns steps as a node has them: of any batch, and with chunks of any size."""
    chance = random.Random(seed)
    steps: list[Step] = []
    while len(steps) < number:
        rows, tokens = chance.choice([0, 1, 2, 4, 8, 16]), chance.choice([0, 0, 0, 8, 16, 40, 256])
        context = chance.choice([0, 0, 256, 512]) if tokens else 0
        if rows or tokens:
            steps.append(Step(rows, rows * chance.randint(50, 400), tokens, context))
    return steps


def learned(machine: Machine, number: int = 400) -> StepCost:
    cost = StepCost()
    for step in steps_of(number):
        step.observe(cost, machine.seconds(step))
    return cost


any_step = st.builds(Step, st.integers(0, 64), st.integers(0, 10**6), st.integers(0, 4096), st.integers(0, 10**5))
any_cost = st.lists(st.tuples(any_step, st.floats(1e-6, 100)), max_size=30)


def cost_of(measured: list[tuple[Step, float]]) -> StepCost:
    cost = StepCost()
    for step, seconds in measured:
        step.observe(cost, seconds)
    return cost


# ------------------------------------------------------------ properties


@settings(max_examples=examples(200))
@given(any_cost, any_step, any_step)
def test_a_step_takes_no_less_with_more_of_anything(measured: list[tuple[Step, float]], step: Step, more: Step) -> None:
    cost = cost_of(measured)
    larger = Step(
        step.rows + more.rows,
        step.context_tokens + more.context_tokens,
        step.prompt_tokens + more.prompt_tokens,
        step.prompt_context + more.prompt_context,
    )
    estimate_s = step.estimate_s(cost)
    assert math.isfinite(estimate_s)
    assert 0 <= estimate_s <= larger.estimate_s(cost) * (1 + 1e-9)
    assert 0 < cost.tokens_per_s < math.inf
    assert 0 <= cost.decode_step_s < math.inf


@settings(max_examples=examples(200))
@given(any_cost, any_step, st.floats(0, 10))
def test_the_tokens_that_fit_into_a_time_are_all_that_fit(
    measured: list[tuple[Step, float]], step: Step, seconds: float
) -> None:
    cost = cost_of(measured)

    def takes_s(tokens: int) -> float:
        return Step(step.rows, step.context_tokens, tokens, step.prompt_context).estimate_s(cost)

    tokens = cost.prompt_tokens_within(seconds, step.rows, step.context_tokens, prompt_context=step.prompt_context)
    assert tokens >= 0
    assert tokens == 0 or takes_s(tokens) <= seconds * (1 + 1e-6)
    assert takes_s(tokens + 1) >= seconds * (1 - 1e-6)


@settings(max_examples=examples(100))
@given(any_cost, any_step, any_step, st.floats(0, 10), st.floats(0, 10))
def test_fewer_tokens_fit_into_less_time_and_beside_more(
    measured: list[tuple[Step, float]], step: Step, more: Step, seconds: float, longer: float
) -> None:
    cost = cost_of(measured)
    fits = cost.prompt_tokens_within(seconds + longer, step.rows, step.context_tokens)
    assert cost.prompt_tokens_within(seconds, step.rows, step.context_tokens) <= fits
    beside = step.rows + more.rows, step.context_tokens + more.context_tokens
    assert cost.prompt_tokens_within(seconds + longer, *beside) <= fits


# ------------------------------------------------------------ learning


def test_before_the_first_prompt_the_cost_of_its_tokens_is_assumed() -> None:
    cost = StepCost()
    assert (cost.known, cost.decoding_known) == (False, False)
    assert cost.estimate_s(4, 1000, 0) == pytest.approx(0)
    assert cost.estimate_s(4, 1000, 50) == pytest.approx(50 * PRIOR_TOKEN_S)
    assert cost.prompt_tokens_within(0.0505, 4, 1000) == 50
    cost.observe(3, 300, 0, 0.02)
    assert (cost.known, cost.decoding_known) == (False, True)
    assert cost.decode_step_s == pytest.approx(0.02)
    assert cost.tokens_per_s == pytest.approx(1 / PRIOR_TOKEN_S)


def test_the_first_step_of_each_kind_counts_in_full() -> None:
    cost = StepCost()
    cost.observe(2, 200, 0, 0.020)
    assert cost.estimate_s(2, 200, 0) == pytest.approx(0.020)
    cost.observe(0, 0, 256, 0.128, now=1.0)
    assert cost.measured_at == 1.0
    assert cost.tokens_per_s == pytest.approx(2000)
    assert cost.estimate_s(2, 200, 10) == pytest.approx(0.025)


def test_every_part_of_a_steady_machine_is_found() -> None:
    machine = Machine()
    cost = learned(machine)
    for step in steps_of(50, seed=2):
        assert step.estimate_s(cost) == pytest.approx(machine.seconds(step), rel=0.05)
    # What was never seen follows from its parts.
    unseen = Step(32, 12_000, 100, 128)
    assert unseen.estimate_s(cost) == pytest.approx(machine.seconds(unseen), rel=0.1)
    assert cost.tokens_per_s == pytest.approx(1 / 0.0037, rel=0.1)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    cost, slower = learned(Machine()), Machine(0.024, 0.0024, 2e-6, 0.020, 0.006, 0.0072, 4e-7)
    for step in steps_of(600, seed=3):
        step.observe(cost, slower.seconds(step))
    for step in steps_of(50, seed=4):
        assert step.estimate_s(cost) == pytest.approx(slower.seconds(step), rel=0.15)


def test_a_step_that_something_else_held_up_moves_little() -> None:
    cost = learned(Machine())
    step = Step(8, 1600, 16, 0)
    before_s = step.estimate_s(cost)
    step.observe(cost, 1000 * before_s)
    assert step.estimate_s(cost) < 1.5 * before_s


def test_noise_leaves_the_estimate_near_the_mean() -> None:
    cost, machine, chance = StepCost(), Machine(), random.Random(5)
    for step in steps_of(2000):
        step.observe(cost, machine.seconds(step) * chance.uniform(0.7, 1.3))
    for step in (Step(8, 1600, 0, 0), Step(8, 1600, 16, 0), Step(0, 0, 256, 0)):
        assert step.estimate_s(cost) == pytest.approx(machine.seconds(step), rel=0.25)


def test_a_long_time_without_prompts_forgets_nothing_of_them() -> None:
    cost, machine = learned(Machine()), Machine()
    for _ in range(3000):
        step = Step(4, 1000, 0, 0)
        step.observe(cost, machine.seconds(step))
    beside = Step(4, 1000, 40, 0)
    assert beside.estimate_s(cost) == pytest.approx(machine.seconds(beside), rel=0.05)


def test_chunks_of_a_few_tokens_do_not_hide_that_more_of_them_cost_little_more() -> None:
    """Each step of a GPU takes its weights' time; a first long chunk has said that its tokens all cost the same."""
    cost, machine = StepCost(), Machine(0.005, 0.0, 0.0, 0.020, 0.020, 0.0001, 0.0)
    Step(0, 0, 256, 0).observe(cost, machine.seconds(Step(0, 0, 256, 0)))
    for _ in range(100):
        for step in (Step(2, 100, 0, 0), Step(2, 100, 8, 0)):
            step.observe(cost, machine.seconds(step))
    tokens = cost.prompt_tokens_within(0.035, 2, 100)
    for _ in range(20):
        step = Step(2, 100, tokens, 0)
        step.observe(cost, machine.seconds(step))
        tokens = cost.prompt_tokens_within(0.035, 2, 100)
    assert tokens == pytest.approx(100, rel=0.2)


def test_decode_steps_are_known_where_each_has_a_chunk() -> None:
    """Then what requests take that decode comes out of how steps of more of them compare."""
    cost, machine, chance = StepCost(), Machine(read_s=0.0, context_s=0.0), random.Random(6)
    Step(1, 100, 0, 0).observe(cost, machine.seconds(Step(1, 100, 0, 0)))
    for _ in range(300):
        step = Step(chance.randint(1, 16), 0, chance.choice([8, 12, 16]), 0)
        step.observe(cost, machine.seconds(step))
    assert cost.estimate_s(16, 0, 0) == pytest.approx(machine.seconds(Step(16, 0, 0, 0)), rel=0.25)


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("slow_times", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_that_follow_the_estimate_neither_stay_too_small_nor_grow_too_large(
    noise: float, slow_times: bool, seed: int
) -> None:
    """What is measured depends on what was estimated, so an estimate must not confirm itself."""
    machine, chance, cost = Machine(0.030, 0.003, 2e-6, 0.020, 0.0, 0.0033, 0.0), random.Random(seed), StepCost()
    target_s, pace = 0.1, 1.0

    def take(step: Step) -> float:
        seconds = pace * machine.seconds(step)
        held_up = 10 if noise and chance.random() < 0.01 else 1
        step.observe(cost, seconds * held_up * chance.uniform(1 - noise, 1 + noise))
        return seconds

    # Before there is more to do, single requests have come: prompts alone, and steps of one that decodes.
    for _ in range(4):
        take(Step(0, 0, 256, 0))
        for _ in range(60):
            take(Step(1, 150, 0, 0))
    rows, tokens, fitting, late = 3, 0, 0.0, 0
    for at in range(1500):
        if slow_times and at % 200 == 0:
            pace = chance.choice([1, 1, 1.5, 2.5])
        if at % 30 == 0:
            rows = max(1, min(8, rows + chance.choice([-1, 0, 1])))
        decoding = Step(rows, rows * 150, 0, 0)
        chunk = max(8, min(256, cost.prompt_tokens_within(target_s, rows, decoding.context_tokens)))
        seconds = take(Step(rows, decoding.context_tokens, chunk, 0))
        if at >= 300:
            tokens += chunk
            fitting += max(8.0, (target_s / pace - machine.seconds(decoding)) / machine.token_s)
            late += chunk > 8 and seconds > 1.25 * target_s
    assert 0.8 * fitting < tokens < 1.1 * fitting
    assert late < 0.1 * 1200


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_no_measurement(seconds: float) -> None:
    cost = StepCost()
    cost.observe(1, 10, 10, seconds)
    cost.observe(0, 0, 0, 0.1)
    assert not cost.known
    assert cost.tokens_per_s == pytest.approx(1 / PRIOR_TOKEN_S)


@pytest.mark.parametrize(("tokens", "known"), [(3, False), (31, False), (32, True), (256, True)])
def test_only_a_long_chunk_tells_the_rate(tokens: int, known: bool) -> None:
    cost = StepCost()
    cost.observe(0, 0, tokens, tokens / 500, now=2.0)
    assert cost.rate_known == known
    assert cost.measured_at == (2.0 if known else -math.inf)
    assert cost.tokens_per_s == pytest.approx(500 if known else 1 / PRIOR_TOKEN_S)


def test_steps_with_borrowed_cores_have_a_pace_of_their_own() -> None:
    cost = StepCost()
    for step in range(200):
        cost.borrowing = step % 3 == 0
        cost.observe(4, 1000, 0, 0.01 if cost.borrowing else 0.018)
        cost.observe(4, 1000, 32, 0.02 if cost.borrowing else 0.036)
    assert cost.spread < 0.05
    for cost.borrowing, decode_s, chunk_s in ((True, 0.01, 0.02), (False, 0.018, 0.036)):
        assert cost.estimate_s(4, 1000, 0) == pytest.approx(decode_s, rel=0.05)
        assert cost.estimate_s(4, 1000, 32) == pytest.approx(chunk_s, rel=0.05)


def test_a_copy_knows_the_same_and_learns_for_itself() -> None:
    cost = StepCost()
    for borrowing in (True, False):
        cost.borrowing = borrowing
        for rows in (0, 1, 8):
            for _ in range(6):
                cost.observe(rows, 100 * rows, 64, 0.05 + 0.01 * rows)
    copied, before = cost.copy(), vars(copy.deepcopy(cost))
    assert estimates(copied) == (known := estimates(cost))
    for borrowing in (True, False):
        copied.borrowing = borrowing
        for _ in range(20):
            copied.observe(4, 400, 64, 0.5)
            copied.observe(8, 800, 64, 0.5)
    assert estimates(cost) == known != estimates(copied)
    cost.observe(2, 100, 10, 0.1)
    again = StepCost()
    vars(again).update(before)
    again.observe(2, 100, 10, 0.1)
    assert estimates(cost) == estimates(again), "what the copy has learnt changes nothing that is learnt here"


def estimates(cost: StepCost) -> list[float]:
    found = []
    for cost.borrowing in (True, False):
        found += [cost.estimate_s(rows, 100 * rows, 64) for rows in (0, 1, 8)]
    return found
