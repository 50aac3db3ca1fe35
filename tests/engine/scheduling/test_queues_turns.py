"""Tests that client requests take turns: one of hundreds of answers does not keep an ordinary one waiting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import Batching, Disaggregation
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.wire.terms import PRIORITY_S
from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_model import answer, talkative
from tests.engine.placements import make_placement
from tests.examples import examples

PROMPTS = [[20 + i, *range(100, 110)] for i in range(8)]
SEEDS = list(range(50))
ORDINARY = 10_000


def big_request(engine: FakeEngine, *, max_tokens: int = 16) -> dict[int, list[int]]:
    """Adds one client's eight prompts with 50 answers each. Returns the answers that it must get."""
    wanted: dict[int, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        first = 1_000 + i * len(SEEDS)
        engine.add(first, prompt, max_tokens, SEEDS, group_id=1)
        wanted |= {first + j: answer(prompt, seed, max_tokens, engine.max_len) for j, seed in enumerate(SEEDS)}
    return wanted


def steps_until_answered(engine: FakeEngine, local_id: int) -> int:
    for step in range(1, 100_000):
        engine.step()
        if local_id in engine.endings:
            return step
    raise AssertionError("never answered")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [600, 40], ids=["enough blocks", "few blocks"])
def test_an_ordinary_request_beside_hundreds_of_answers_is_served_at_once(num_blocks: int, overlap: bool) -> None:
    """The small request waits for no answer of the big one, which still gets all of its answers."""
    engine = FakeEngine(num_blocks=num_blocks, max_num_seqs=64, max_num_batched_tokens=256, overlap=overlap)
    wanted = big_request(engine, max_tokens=24)
    for _ in range(10):
        engine.step()
    prompt = [7, 8, 9]
    engine.add(ORDINARY, prompt, 8, [talkative(prompt, 8)])
    assert steps_until_answered(engine, ORDINARY) <= 8 + 3
    assert engine.outputs[ORDINARY] == answer(prompt, talkative(prompt, 8), 8, engine.max_len)
    assert len(engine.endings) < len(wanted) / 4, "the big request is far from its end"
    engine.run(100_000)
    assert {local_id: engine.outputs[local_id] for local_id in wanted} == wanted
    assert engine.idle


def test_a_place_goes_to_who_holds_the_fewest_and_then_to_who_waits_longest() -> None:
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=64)
    rich = [engine.add(i, [50 + i], 16, group_id=1) for i in range(6)]
    poor = [engine.add(10 + i, [60 + i], 16, group_id=2) for i in range(2)]
    alone = engine.add(20, [70], 16)
    engine.step()
    assert running(rich) + running(poor) + running([alone]) == [rich[0], rich[1], poor[0], alone]


def test_a_client_request_without_a_place_gets_one_of_him_who_has_several() -> None:
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=64)
    rich = [engine.add(i, [50 + i], 16, group_id=1) for i in range(6)]
    engine.step()
    assert running(rich) == rich[:4]
    others = [engine.add(10 + i, [60 + i], 16) for i in range(5)]
    for _ in range(6):
        engine.step()
    assert running(rich) == rich[:1], "the youngest are preempted, and no client request loses its last place"
    assert running(others) == others[:3]
    assert engine.scheduler.counters.preemptions == 3
    engine.run()


def test_requests_of_one_answer_are_served_as_they_come_and_none_is_preempted() -> None:
    engine = FakeEngine(max_num_seqs=2, max_num_batched_tokens=64)
    requests = [engine.add(i, [50 + i], 4) for i in range(8)]
    order: list[Request] = []
    for _ in range(60):
        engine.step()
        order += [request for request in running(requests) if request not in order]
    assert order == sorted(order, key=lambda request: request.local_id or 0)
    assert engine.scheduler.counters.preemptions == 0


def test_a_static_batch_is_not_disturbed() -> None:
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=64, batching=Batching.STATIC)
    rich = [engine.add(i, [50 + i], 16, group_id=1) for i in range(6)]
    engine.step()
    engine.add(10, [60], 4)
    engine.step()
    assert running(rich) == rich[:4]


def test_answers_that_wait_for_their_prompt_count_as_waiting() -> None:
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=8)
    engine.add(0, list(range(100, 140)), 4, SEEDS[:10])
    assert engine.scheduler.num_waiting + engine.scheduler.num_children == 10
    engine.step()
    assert engine.scheduler.num_waiting + engine.scheduler.num_children == 9


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    max_num_seqs=st.integers(1, 6),
    num_blocks=st.integers(16, 60),
)
def test_no_client_request_without_a_place_waits_beside_one_with_several(
    sizes: list[int], max_num_seqs: int, num_blocks: int
) -> None:
    """After a step for each place, no client request has several places while another one has none."""
    engine = FakeEngine(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_len=48)
    families = [
        [engine.add(100 * whose + i, [whose, i], 40, group_id=whose + 1) for i in range(size)]
        for whose, size in enumerate(sizes)
    ]
    for _ in range(max_num_seqs + 1):
        engine.step()
    held = [len(running(family)) for family in families if any(not request.ended for request in family)]
    if engine.endings == {} and held:
        assert min(held) > 0 or max(held) <= 1
    engine.run(10_000)
    assert engine.idle


def running(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.status is Status.RUNNING]


def test_a_lower_priority_goes_first_and_a_higher_one_is_overtaken_for_a_bounded_time() -> None:
    engine = FakeEngine(max_num_seqs=1, max_num_batched_tokens=64)
    engine.add(0, [50], 4, [talkative([50], 4)])
    engine.step()
    for local_id, priority in ((1, 0), (2, 3), (3, -2), (4, 0)):
        engine.add(local_id, [60 + local_id], 1, priority=priority)
    # This one comes when the third has waited for longer than its priority lets it.
    engine.now += 3 * PRIORITY_S + 1
    engine.add(5, [70], 1)
    engine.run()
    assert list(engine.endings) == [0, 3, 1, 4, 2, 5]
    assert engine.idle


# ------------------------------------------------------------ prompts that take many steps


class HalfKept(FakeEngine):
    """An engine that checks that prompts which run before a step get half of what that has for prompts."""

    def __init__(self, step_tokens: int, *, prefix_cache: bool, overlap: bool) -> None:
        super().__init__(
            num_blocks=400,
            max_num_seqs=16,
            max_num_batched_tokens=step_tokens,
            max_len=200,
            prefix_cache=prefix_cache,
            overlap=overlap,
            placement=make_placement(4, Disaggregation.NEVER),
        )
        self._step_tokens = step_tokens

    @property
    def tokens_for_prompts(self) -> int:
        return self._step_tokens - len([request for request in self._running if request.prompt_is_computed])

    @property
    def _running(self) -> list[Request]:
        return running(list(self.scheduler.live()))

    def step(self) -> BatchPlan:
        left = {request: request.num_uncomputed_tokens for request in self._running if not request.prompt_is_computed}
        # One token less than half, if otherwise a single one were left for the next step.
        least = self.tokens_for_prompts // 2 - 1
        plan = super().step()
        given = sum(work.num_tokens for work in plan.work if work.request in left)
        assert given >= min(least, sum(left.values()))
        return plan


@settings(max_examples=examples(60))
@given(
    step_tokens=st.integers(16, 60),
    longs=st.lists(st.integers(90, 150), min_size=1, max_size=3),
    shorts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=4),
    num_streams=st.integers(0, 3),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
    remote=st.booleans(),
)
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(
    step_tokens: int,
    longs: list[int],
    shorts: list[tuple[int, int]],
    num_streams: int,
    prefix_cache: bool,
    overlap: bool,
    remote: bool,
) -> None:
    """Short is what half of a step computes, also if a few more requests than now decode in it."""
    engine = HalfKept(step_tokens, prefix_cache=prefix_cache, overlap=overlap)
    wanted: dict[int, list[int]] = {}

    def ask(prompt: list[int], max_tokens: int, *, remote: bool = False) -> Request:
        local_id = len(wanted)
        seed = talkative(prompt, max_tokens)
        wanted[local_id] = answer(prompt, seed, max_tokens, engine.max_len)
        return engine.add(local_id, prompt, max_tokens, [seed], remote=remote)

    for at in range(num_streams):
        ask([10 + at], 40)
    engine.step()
    for at, length in enumerate(longs):
        ask([20 + at, *range(100, 99 + length)], 2)
    for _ in range(2):  # the first step may have been launched before
        engine.step()
    for at, (length, after) in enumerate(shorts):
        for _ in range(after):
            engine.step()
        short = ask([40 + at, *range(300, 299 + length)], 2, remote=remote)
        if 2 * length <= engine.tokens_for_prompts - 5:
            # A short one may have come before it, and a step may have been launched before both.
            for _ in range(2 + overlap):
                if short.facts.first_token_at is None:
                    engine.step()
            assert short.facts.first_token_at is not None
    engine.run()
    assert engine.outputs == wanted
    assert engine.idle
