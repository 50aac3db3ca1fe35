"""Requests are asked to leave before blocks run out, in the order in which they would be preempted."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.request import Request
from pdserve.engine.scheduling import block_shortage
from pdserve.engine.scheduling.block_shortage import AGAIN_S, AHEAD_BLOCKS, LEAVING_S
from pdserve.wire.cache_groups import Keep
from pdserve.wire.engine import MoveWanted
from tests.engine.fake_engine import BLOCK_SIZE, FakeEngine
from tests.engine.fake_model import answer, groups_of

PROMPT = [30, 31, 30, 31, 30, 31]
"""Two blocks with the answer's first two tokens."""
SOON = AHEAD_BLOCKS * BLOCK_SIZE
"""The tokens of each request that count as needed, where nothing is known of the time that a step takes."""


def named(engine: FakeEngine, step_s: float = 0.0) -> list[int]:
    """Returns the ids of the requests that are asked to leave now, the first answers of their client requests."""
    return [wanted.local_id for wanted in engine.scheduler.move_wanted(engine.now, step_s)]


def begun(engine: FakeEngine, *max_tokens: int, movable: bool = True) -> list[Request]:
    """Adds a request with each of ``max_tokens``, and makes steps until all of them have a token."""
    first = len(engine.outputs)
    requests = [
        engine.add(first + i, [*PROMPT, i], most, movable=movable, group_id=first + i + 1)
        for i, most in enumerate(max_tokens)
    ]
    while not all(request.num_generated_tokens for request in requests):
        engine.step()
    return requests


def test_nobody_leaves_while_there_are_blocks() -> None:
    engine = FakeEngine(num_blocks=8)
    begun(engine, 20, 20)
    assert engine.blocks.num_free == 2 * AHEAD_BLOCKS
    assert named(engine) == []


def test_the_youngest_leaves_with_the_blocks_that_it_has_and_needs_soon() -> None:
    engine = FakeEngine(num_blocks=7)
    _, youngest = begun(engine, 20, 20)
    assert engine.scheduler.move_wanted(engine.now, 0.0) == [
        MoveWanted(1, (len(youngest.block_table) + AHEAD_BLOCKS) * BLOCK_SIZE)
    ]
    assert engine.scheduler.counters.moves_wanted == 1


def test_a_quick_node_looks_further_ahead() -> None:
    engine = FakeEngine(num_blocks=12)
    begun(engine, 20, 20)
    assert named(engine, step_s=block_shortage.AHEAD_S / SOON) == []
    engine.now += block_shortage.LOOK_S
    assert named(engine, step_s=block_shortage.AHEAD_S / 20) == [1]


def test_a_request_whose_steps_give_several_tokens_needs_more_blocks() -> None:
    engine = FakeEngine(num_blocks=12)
    requests = begun(engine, 20, 20)
    step_s = block_shortage.AHEAD_S / SOON
    assert named(engine, step_s) == []
    for request in requests:
        while request.num_generated_tokens < 3:
            engine.step()
        request.facts.accepted_drafts = 2
    engine.now += block_shortage.LOOK_S
    assert named(engine, step_s) == [1]


def test_tokens_that_never_come_need_no_blocks() -> None:
    engine = FakeEngine(num_blocks=5)
    begun(engine, 2, 2)
    assert engine.blocks.num_free < 2 * AHEAD_BLOCKS
    assert named(engine) == []


def test_the_last_one_stays() -> None:
    """It has all blocks then, and where it would go it would have no more."""
    engine = FakeEngine(num_blocks=3)
    begun(engine, 20)
    assert named(engine) == []


def test_one_that_nobody_can_go_on_with_stays_and_an_older_one_leaves() -> None:
    engine = FakeEngine(num_blocks=7)
    begun(engine, 20)
    begun(engine, 20, movable=False)
    assert named(engine) == [0]


def test_one_that_is_asked_is_not_asked_again_for_a_while() -> None:
    engine = FakeEngine(num_blocks=7)
    begun(engine, 20, 20)
    assert named(engine) == [1]
    engine.now += LEAVING_S / 2
    assert named(engine) == [], "it may be on its way"
    engine.now += LEAVING_S / 2
    assert named(engine) == [0], "nobody has taken it, and the other one may fit elsewhere"
    engine.now += LEAVING_S
    assert named(engine) == []
    engine.now += AGAIN_S - 2 * LEAVING_S
    assert named(engine) == [1]


def test_if_it_does_not_leave_the_next_one_is_asked() -> None:
    engine = FakeEngine(num_blocks=11)
    begun(engine, 20, 20, 20)
    assert named(engine) == [2]
    engine.now += LEAVING_S
    assert named(engine) == [1]


def test_as_many_leave_as_the_others_need() -> None:
    engine = FakeEngine(num_blocks=12, max_num_batched_tokens=64)
    begun(engine, 20, 20, 20, 20)
    assert named(engine) == [3]
    crowded = FakeEngine(num_blocks=18, max_num_batched_tokens=64)
    begun(crowded, *[20] * 6)
    assert named(crowded) == [5, 4]


def test_the_answers_to_a_client_request_leave_together_and_first() -> None:
    engine = FakeEngine(num_blocks=10)
    engine.add(0, PROMPT, 20, seeds=(0, 1), movable=True, group_id=1)
    engine.add(2, [*PROMPT, 9], 20, movable=True, group_id=2)
    while not engine.outputs.get(2):
        engine.step()
    (wanted,) = engine.scheduler.move_wanted(engine.now, 0.0)
    assert wanted.local_id in (0, 1)


@pytest.mark.parametrize(
    ("group", "count"),
    [((Keep.LATEST, 0), 4), ((Keep.WINDOW, 8), 12)],
)
def test_one_leaves_where_a_window_or_states_run_out(group: tuple[Keep, int], count: int) -> None:
    """Whole contexts have plenty. What is taken after both were admitted is a push of cached blocks."""
    engine = FakeEngine(groups=groups_of([(*group, count)], 64), max_num_batched_tokens=8)
    _, youngest = begun(engine, 20, 20)
    assert named(engine) == []
    engine.now += block_shortage.LOOK_S
    taken = BlockTable()
    pool = engine.blocks.pools[1]
    for _ in range(pool.num_free):
        other = BlockTable()
        assert engine.blocks.grow_bounded(other, 0, 1)
        taken.extend(other.every_block())
    tokens = (len(youngest.block_table) + AHEAD_BLOCKS) * BLOCK_SIZE
    assert engine.scheduler.move_wanted(engine.now, 0.0) == [MoveWanted(1, tokens)]
    engine.blocks.free(taken)


@pytest.mark.integration  # for the seconds that it takes
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 24),
    max_num_seqs=st.integers(2, 6),
    max_num_batched_tokens=st.integers(8, 24),
)
def test_where_another_node_has_room_nobody_is_preempted(
    seed: int, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """The other node goes on with each answer that is asked to leave, and every answer is right."""
    random = Random(seed)
    here = FakeEngine(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_len=44
    )
    there = FakeEngine(num_blocks=200, max_num_seqs=100, max_num_batched_tokens=64, max_len=44)
    prompts: dict[int, list[int]] = {}
    requests: dict[int, Request] = {}
    limits: dict[int, int] = {}

    def step() -> bool:
        worked = bool(here.step().work) | bool(there.step().work)
        for local_id in named(here):
            request = requests[local_id]
            here.scheduler.abort(request)
            there.add(local_id, prompts[local_id], limits[local_id], (local_id,), emitted=[request.answer])
        return worked

    for local_id in range(random.randint(1, 10)):
        prompts[local_id] = random.choices((30, 31), k=random.randint(1, 20))
        limits[local_id] = random.randint(1, 24)
        requests[local_id] = here.add(
            local_id, prompts[local_id], limits[local_id], (local_id,), movable=True, group_id=local_id + 1
        )
        for _ in range(random.randint(0, 9)):
            step()
    while step():
        pass
    for local_id, prompt in prompts.items():
        got = here.outputs.get(local_id, []) + there.outputs.get(local_id, [])
        assert got == answer(prompt, local_id, limits[local_id], 44)
    assert here.scheduler.counters.preemptions == 0
    assert here.idle
    assert there.idle
