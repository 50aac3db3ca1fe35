"""Tests that prompts hold up requests that decode for no longer than the ITL target says, and come to their ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.config import Batching
from pdserve.engine.placement.latency_targets import LEAST_PROMPT_TOKENS
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.wire.discovery import Role
from pdserve.wire.terms import RequestTargets
from tests.engine.fake_engine import FakeEngine, FakeLaunchedStep
from tests.engine.fake_model import answer, talkative
from tests.engine.placements import make_placement
from tests.examples import examples

TOKEN_S = 0.001
"""What a token of a prompt takes on the machine of these tests."""
ROW_S = 0.002
"""What a request that decodes takes."""
PROMPT = list(range(3, 35))


def learned(token_s: float = TOKEN_S, row_s: float = ROW_S, beside_s: float = 0.0) -> StepCost:
    """Returns the cost of steps on a machine where each part takes the same time everywhere."""
    cost = StepCost()
    for _ in range(10):
        for rows in (1, 2, 5, 8):
            cost.observe(rows, 0, 0, rows * row_s)
            for tokens in (8, 16, 32):
                cost.observe(rows, 0, tokens, rows * row_s + beside_s + tokens * token_s)
    return cost


def engine(
    target_itl_ms: float = 0.0,
    role: Role = Role.DECODE,
    cost: StepCost | None = None,
    *,
    max_num_batched_tokens: int = 48,
    batching: Batching = Batching.CONTINUOUS,
    overlap: bool = False,
    num_blocks: int = 128,
) -> FakeEngine:
    placement = make_placement(
        4, step_cost=cost or learned(), target_itl_ms=target_itl_ms, role=role, batching=batching
    )
    return FakeEngine(
        placement=placement,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_len=200,
        batching=batching,
        overlap=overlap,
    )


def stream(engine: FakeEngine, local_id: int, max_tokens: int = 60, itl_ms: float | None = None) -> Request:
    """Adds a request, and has it decode."""
    prompt = [5 + local_id, 6, 7, 8]
    own = RequestTargets(itl_ms=itl_ms)
    request = engine.add(local_id, prompt, max_tokens, [talkative(prompt, max_tokens)], own_targets=own)
    engine.step()
    return request


def chunks(plan: BatchPlan) -> list[int]:
    return [work.num_tokens for work in plan.work if work.is_chunk]


# ------------------------------------------------------------ which steps have a bound


def test_a_prompt_beside_a_stream_is_cut_to_fit_into_the_target() -> None:
    bounded = engine(target_itl_ms=14)
    stream(bounded, 0)
    bounded.add(1, PROMPT)
    sizes = [chunks(bounded.step()) for _ in range(3)]
    # A stream takes 2 ms of 14. The last chunk is what is left of 32 tokens, and may have more than one token only.
    assert sum(sizes[0] + sizes[1] + sizes[2]) == len(PROMPT)
    assert all(11 <= tokens <= 12 for tokens in sizes[0] + sizes[1])


def test_without_a_stream_a_chunk_is_as_long_as_a_step_allows() -> None:
    bounded = engine(target_itl_ms=14)
    bounded.add(0, PROMPT)
    bounded.add(1, [9, *PROMPT])
    assert chunks(bounded.step()) == [32, 16]


def test_a_decode_node_aims_at_twice_what_its_step_takes_without_prompts() -> None:
    bounded = engine()
    for local_id in range(6):
        stream(bounded, local_id)
    bounded.add(6, PROMPT)
    # Six streams take 12 ms, so there are 12 ms for the prompt.
    assert all(11 <= tokens <= 12 for tokens in chunks(bounded.step()))


@pytest.mark.parametrize(("role", "longest"), [(Role.MIXED, 12), (Role.PREFILL, 32)])
def test_other_nodes_have_the_operators_target_or_a_looser_one_or_none(role: Role, longest: int) -> None:
    for target_itl_ms, expected in ((0.0, longest), (11.0, 9)):
        bounded = engine(target_itl_ms, role)
        stream(bounded, 0)
        bounded.add(1, PROMPT)
        # A stream takes 2 ms: of 14 on a mixed node.
        assert expected - 1 <= max(chunks(bounded.step())) <= expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mixed_nodes_long_gaps_are_at_most_eight_times_its_median(overlap: bool) -> None:
    """Steps may take many prompts whole, as is usual on a GPU, and are launched ahead or in turn."""
    mixed = TimedEngine(overlap=overlap)
    mixed.serve(clients=8, requests=48)
    assert mixed.longest_chunks == 8 * 500, "the first prompts are computed together, because nobody decodes"
    gaps = sorted(mixed.gaps[len(mixed.gaps) // 4 :])
    median, p99 = gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]
    assert 4 * median <= p99 <= 8 * median


class TimedEngine(FakeEngine):
    """A mixed node that learns what its steps take, as ``StepLoop`` has it do, on a machine where a long prompt takes
    as long as nine decode steps."""

    def __init__(self, *, overlap: bool) -> None:
        self.cost = StepCost()
        super().__init__(
            placement=make_placement(4, step_cost=self.cost, role=Role.MIXED),
            overlap=overlap,
            num_blocks=1200,
            max_num_batched_tokens=8192,
            max_len=550,
            prefix_cache=False,
        )
        self.gaps: list[float] = []
        """How long each token came after the one before it."""
        self.longest_chunks = 0

    def serve(self, clients: int, requests: int) -> None:
        """Answers so many requests, each of which comes when one before it has ended."""
        for local_id in range(requests):
            while local_id - len(self.endings) >= clients:
                self.step()
            prompt = [3 + local_id % 30] * 500
            answer_tokens = 20 + local_id % 7
            self.add(local_id, prompt, answer_tokens, [talkative(prompt, answer_tokens)])
        self.run()

    def _postprocess(self, step: FakeLaunchedStep) -> None:
        plan = step.plan
        rows, tokens = plan.num_decoding, plan.num_prompt_tokens
        seconds = 0.004 * (rows > 0) + 0.0002 * rows + 0.0001 * tokens
        self.cost.observe(rows, plan.context_tokens, tokens, seconds, prompt_context=plan.prompt_context)
        self.gaps += [seconds] * rows
        self.longest_chunks = max(self.longest_chunks, tokens)
        super()._postprocess(step)


def test_a_decode_node_measures_a_step_without_prompts_before_it_computes_prompts_beside_streams() -> None:
    """Nothing would ever tell how long such a step takes if every step had prompts."""
    cost = StepCost()
    bounded = engine(cost=cost)
    stream(bounded, 0)
    bounded.add(1, PROMPT)
    assert chunks(bounded.step()) == []
    cost.observe(1, 5, 0, ROW_S)
    assert chunks(bounded.step()) == [LEAST_PROMPT_TOKENS]
    for role, itl_ms, first in ((Role.MIXED, None, []), (Role.PREFILL, None, [32]), (Role.PREFILL, 1.0, [])):
        other = engine(cost=StepCost(), role=role)
        stream(other, 0, itl_ms=itl_ms)
        other.add(1, PROMPT)
        assert chunks(other.step()) == first, "a request's own target is no less than twice such a step"


def test_a_static_batch_has_no_bound() -> None:
    bounded = engine(target_itl_ms=14, batching=Batching.STATIC)
    for local_id in range(2):
        bounded.add(local_id, [local_id + 5, *PROMPT], 3)
    assert chunks(bounded.step()) == [33, 15]
    bounded.run()


def test_steps_that_differ_from_their_estimates_aim_below_the_target() -> None:
    sizes = []
    for noise in (0.0, 0.3):
        cost = learned()
        for at in range(100):
            cost.observe(1, 0, 8, (ROW_S + 8 * TOKEN_S) * (1 + (noise if at % 2 else -noise)))
        assert cost.spread == pytest.approx(noise, abs=0.05)
        targets = make_placement(4, step_cost=cost, target_itl_ms=20).targets
        assert targets.aim_s(1, 5) == pytest.approx(0.020 / (1 + cost.spread))
        bounded = engine(target_itl_ms=20, cost=cost)
        stream(bounded, 0)
        bounded.add(1, PROMPT)
        sizes += chunks(bounded.step())
    steady, unsteady = sizes
    assert 17 <= steady <= 18
    assert unsteady == pytest.approx((0.020 / 1.3 - ROW_S) / TOKEN_S, abs=2)


# ------------------------------------------------------------ requests with targets of their own


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
def test_the_tightest_target_of_a_request_holds(role: Role) -> None:
    bounded = engine(target_itl_ms=30, role=role)
    for local_id, itl_ms in enumerate([20, None, 25]):
        stream(bounded, local_id, itl_ms=itl_ms)
    bounded.add(3, PROMPT)
    # Three streams take 6 ms of 20.
    assert 13 <= chunks(bounded.step())[0] <= 14


def test_a_looser_target_holds_where_every_stream_has_one() -> None:
    bounded = engine()
    stream(bounded, 0, itl_ms=1000)
    bounded.add(1, PROMPT, own_targets=RequestTargets(itl_ms=900))
    assert chunks(bounded.step()) == [32]
    stream(bounded, 2)
    bounded.add(3, [9, *PROMPT])
    # Three streams take 6 ms, and one of them has no target but the node's: twice as long.
    assert 5 <= chunks(bounded.step())[0] <= LEAST_PROMPT_TOKENS


def test_no_request_slows_prompts_more_than_a_decode_node_does() -> None:
    bounded = engine(role=Role.MIXED)
    for local_id in range(6):
        stream(bounded, local_id, itl_ms=1)
    bounded.add(6, PROMPT)
    # Six streams take 12 ms, so there are 12 ms for the prompt.
    assert all(11 <= tokens <= 12 for tokens in chunks(bounded.step()))


# ------------------------------------------------------------ how much is always computed


@pytest.mark.parametrize("target_itl_ms", [0.001, 1.0])
def test_a_prompt_goes_on_however_tight_the_target_is(target_itl_ms: float) -> None:
    bounded = engine(target_itl_ms)
    stream(bounded, 0)
    bounded.add(1, PROMPT)
    bounded.add(2, [9, *PROMPT])
    sizes = [chunks(bounded.step()) for _ in range(9)]
    # The second prompt has 33 tokens: the last one is not left alone.
    assert sizes == [[LEAST_PROMPT_TOKENS]] * 7 + [[LEAST_PROMPT_TOKENS - 1], [2]]


def test_several_prompts_share_what_fits() -> None:
    bounded = engine(target_itl_ms=14)
    stream(bounded, 0)
    for local_id in range(1, 5):
        bounded.add(local_id, [local_id + 5, 6, 7, 8, 9])
    assert chunks(bounded.step()) == [5, 5]


def test_a_prompt_that_has_landed_needs_no_time_for_prompts() -> None:
    """A replayed answer is no prompt, either: only chunks wait for a step with more time."""
    bounded = engine(target_itl_ms=0.001)
    stream(bounded, 0)
    bounded.add(1, PROMPT)
    plan = bounded.step()
    assert chunks(plan) == [LEAST_PROMPT_TOKENS]
    resumed = bounded.add(2, [5, 6, 7, 8], 20, emitted=[answer([5, 6, 7, 8], 0, 3, 200)])
    plans = [bounded.step() for _ in range(6)]
    assert resumed.facts.first_token_at is not None, [chunks(plan) for plan in plans]


# ------------------------------------------------------------ any traffic


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    after: int
    """The steps after the request before."""


class WatchedEngine(FakeEngine):
    """An engine that checks each step's plan before it computes it."""

    def __init__(self, cost: StepCost, target_itl_ms: float, *, overlap: bool, num_blocks: int) -> None:
        placement = make_placement(4, step_cost=cost, target_itl_ms=target_itl_ms)
        super().__init__(
            placement=placement, overlap=overlap, num_blocks=num_blocks, max_num_batched_tokens=48, max_len=200
        )
        self._cost = cost
        self._target_s = target_itl_ms / 1000

    def _launch(self) -> FakeLaunchedStep | None:
        schedule = self.scheduler.schedule

        def checked(now: float) -> BatchPlan:
            plan = schedule(now)
            self._check(plan)
            return plan

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.scheduler, "schedule", checked)
            return super()._launch()

    def _check(self, plan: BatchPlan) -> None:
        prompts = [work for work in plan.work if not work.request.prompt_is_computed]
        assert all(work.num_tokens > 1 or work.request.num_prompt_tokens == 1 for work in prompts)
        decoding = [work for work in plan.work if work.num_tokens == 1 and work.request.prompt_is_computed]
        rows = sum(work.num_tokens for work in plan.work if not work.is_chunk)
        tokens = plan.num_prompt_tokens
        if decoding and tokens > LEAST_PROMPT_TOKENS:
            assert self._cost.estimate_s(rows, 0, tokens) <= self._target_s * 1.01


asked = st.builds(Asked, st.lists(st.integers(3, 39), min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 6))


@settings(max_examples=examples(100))
@given(
    st.lists(asked, min_size=1, max_size=10),
    st.floats(0.5, 40),
    st.floats(1e-4, 3e-3),
    st.floats(1e-4, 3e-3),
    st.floats(0, 5e-3),
    st.booleans(),
    st.sampled_from([20, 64]),
)
# A prompt of one token joins a step as a row, after a chunk that was cut without it.
@example([Asked([3], 2, 0), Asked([3] * 9, 1, 1), Asked([3], 1, 0)], 5.0, 0.000124478, 0.002796, 0.0, False, 20)
def test_steps_stay_within_the_target_and_every_answer_is_the_same(
    traffic: list[Asked],
    target_itl_ms: float,
    token_s: float,
    row_s: float,
    beside_s: float,
    overlap: bool,
    num_blocks: int,
) -> None:
    cost = learned(token_s, row_s, beside_s)
    bounded = WatchedEngine(cost, target_itl_ms, overlap=overlap, num_blocks=num_blocks)
    for local_id, one in enumerate(traffic):
        for _ in range(one.after):
            bounded.step()
        bounded.add(local_id, one.prompt, one.max_tokens)
    for _ in range(2000):
        bounded.step()
        if bounded.idle:
            break
    assert bounded.outputs == {
        local_id: answer(one.prompt, 0, one.max_tokens, 200) for local_id, one in enumerate(traffic)
    }
