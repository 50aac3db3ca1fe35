"""Tests several answers to one prompt, which is computed once: each is what a request of its own would get."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.engine.request import Status
from pdserve.wire.engine import FinishReason, PrefillSource
from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_model import EOS, answer, talkative
from tests.engine.fake_transfer import Wire

PROMPT = list(range(100, 110))
"""A prompt of two full blocks and half of one."""
SEEDS = [seed for seed in range(100) if len(answer(PROMPT, seed, 9, 64)) == 9][:3]
WANTED = {i: answer(PROMPT, seed, 9, 64) for i, seed in enumerate(SEEDS)}
SHORT_SEED = next(seed for seed in range(1000) if answer(PROMPT, seed, 9, 64) == [EOS])
"""A seed whose answer ends with the first token."""


def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared() -> None:
    engine = FakeEngine(prefix_cache=False)
    parent = engine.add(0, PROMPT, 9, SEEDS)
    children = list(parent.children)
    (work,) = engine.step().work
    assert work.num_tokens == 10
    tables = [request.block_table for request in (parent, *children)]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert [engine.blocks.num_holders(block) for block in tables[0]] == [3, 3, 3], "two copies hold the last one"
    assert len({table[2] for table in tables}) == 3
    plan = engine.step()
    assert [engine.blocks.num_holders(block) for block in tables[0][:3]] == [3, 3, 1]
    assert sorted(plan.copies) == sorted(table[2] for table in tables[1:])
    assert set(plan.copies.values()) == {tables[0][2]}
    engine.run()
    assert engine.outputs == WANTED
    assert engine.idle


def test_a_prompt_of_whole_blocks_needs_no_copies() -> None:
    engine = FakeEngine()
    engine.add(0, PROMPT[:8], 9, SEEDS)
    engine.step()
    assert engine.step().copies == {}
    engine.run()
    assert engine.outputs == {i: answer(PROMPT[:8], seed, 9, 64) for i, seed in enumerate(SEEDS)}


def test_prompt_and_prefill_count_once_and_every_answer_names_who_prefilled() -> None:
    engine = FakeEngine()
    engine.add(0, PROMPT, 9, SEEDS)
    engine.run()
    counters = engine.scheduler.counters
    assert (counters.prompt_tokens, counters.generated_tokens) == (10, 27)
    assert (counters.prefix_cache_queries, counters.prefills[PrefillSource.LOCAL]) == (10, 1)
    engine.add(3, PROMPT, 9, SEEDS[:1])
    engine.run()
    assert (counters.prompt_tokens, counters.cached_prompt_tokens, counters.transferred_prompt_tokens) == (20, 8, 0)
    reports = [engine.endings[i].report for i in range(3)]
    assert len({(report.prefill_source, report.queue_s) for report in reports if report is not None}) == 1


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(16, 1), (6, 8)])
def test_children_for_which_there_is_no_place_or_block_wait(num_blocks: int, max_num_seqs: int) -> None:
    engine = FakeEngine(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_len=24)
    engine.add(0, PROMPT, 9, SEEDS)
    engine.step()
    assert all(engine.outputs[i] == WANTED[i][:1] for i in range(3)), "all first tokens come at once"
    engine.run()
    assert engine.outputs == WANTED
    assert engine.idle


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_one_that_is_aborted_leaves_the_others(leaver: int, steps: int) -> None:
    engine = FakeEngine(max_num_batched_tokens=8)
    parent = engine.add(0, PROMPT, 9, SEEDS)
    members = [parent, *parent.children]
    for _ in range(steps):
        engine.step()
    engine.scheduler.abort(members[leaver])
    assert engine.scheduler.find(leaver) is None
    engine.run()
    others = {i: WANTED[i] for i in range(3) if i != leaver}
    assert {i: engine.outputs[i] for i in others} == others
    assert leaver not in engine.endings
    assert engine.idle


def test_when_all_are_aborted_the_prompt_is_given_up() -> None:
    engine = FakeEngine(max_num_batched_tokens=4)
    parent = engine.add(0, PROMPT, 9, SEEDS)
    members = [parent, *parent.children]
    engine.step()
    for member in members:
        assert not engine.idle
        engine.scheduler.abort(member)
    assert engine.idle
    assert engine.step().work == []


def test_an_answer_of_one_token_does_not_end_the_others() -> None:
    for seeds in ([SHORT_SEED, *SEEDS[:2]], [SEEDS[0], SHORT_SEED, SEEDS[1]], [SHORT_SEED] * 3):
        engine = FakeEngine()
        engine.add(0, PROMPT, 9, seeds)
        engine.run()
        assert engine.outputs == {i: answer(PROMPT, seed, 9, 64) for i, seed in enumerate(seeds)}
        assert engine.idle


@pytest.mark.parametrize("leavers", [0, 1])
def test_when_logits_are_not_finite_all_end_and_the_blocks_are_cleared(leavers: int) -> None:
    engine = FakeEngine()
    parent = engine.add(0, PROMPT, 9, SEEDS)
    family = [parent, *parent.children]
    for leaver in family[:leavers]:
        engine.scheduler.abort(leaver)
    plan = engine.scheduler.schedule(1.0)
    assert plan.sampled_requests == family[leavers:]
    table = list(parent.block_table)
    failed = engine.scheduler.postprocess(plan, [None] * len(plan.sampled_requests), 1.0)
    assert failed == family
    # The step loop does the same.
    for request in failed:
        engine.blocks.taint(request.block_table)
        engine.scheduler.finish(request, FinishReason.ERROR, "not finite")
    engine.collect()
    assert set(engine.endings) == set(range(leavers, 3))
    assert engine.blocks.num_cached == 0
    assert not engine.idle
    cleared: list[int] = []
    engine.blocks.clean(cleared.extend)
    assert sorted(cleared) == sorted(table)
    assert engine.idle


class Pair:
    """A decode node, a prefill node and the wire between them."""

    def __init__(self) -> None:
        self.wire = Wire(Random(0))
        self.decode = FakeEngine(thread=self.wire.decode)
        self.prefill = FakeEngine(thread=self.wire.prefill)

    def turn(self, share: float = 1.0) -> None:
        self.decode.step()
        self.prefill.step()
        self.wire.deliver(self.prefill.model, self.decode.model, share)

    def finish(self) -> None:
        for _ in range(100):
            if self.decode.idle and self.prefill.idle:
                return
            self.turn()
        raise AssertionError("the pair does not come to an end")


def test_a_prefill_node_samples_every_first_token_and_the_prompt_moves_once() -> None:
    pair = Pair()
    pair.decode.add(0, PROMPT, 9, SEEDS, remote=True)
    pair.finish()
    assert pair.decode.outputs == WANTED
    assert pair.wire.moved == 3
    counters, elsewhere = pair.decode.scheduler.counters, pair.prefill.scheduler.counters
    assert (counters.prompt_tokens, counters.transferred_prompt_tokens, counters.generated_tokens) == (10, 10, 27)
    assert (elsewhere.prompt_tokens, elsewhere.generated_tokens) == (0, 0)
    assert pair.decode.scheduler.counters.prefills[PrefillSource.REMOTE] == 1


def test_a_parent_that_leaves_before_the_prompt_is_fetched_leaves_the_fetch() -> None:
    pair = Pair()
    parent = pair.decode.add(0, PROMPT, 9, SEEDS, remote=True)
    pair.decode.step()
    pair.decode.scheduler.abort(parent)
    assert parent.status is Status.WAITING_FOR_REMOTE_KVS
    pair.finish()
    assert {i: pair.decode.outputs[i] for i in (1, 2)} == {i: WANTED[i] for i in (1, 2)}
    assert 0 not in pair.decode.outputs
    assert pair.wire.moved == 3


def test_first_tokens_that_clients_have_are_not_repeated_by_a_second_fetch() -> None:
    pair = Pair()
    parent = pair.decode.add(0, PROMPT, 9, SEEDS, remote=True)
    pair.decode.step()
    pair.decode.scheduler.abort(parent)
    pair.turn(share=0.0)
    pair.decode.step()
    assert {i: pair.decode.outputs[i] for i in (1, 2)} == {i: WANTED[i][:1] for i in (1, 2)}
    pair.wire.lose()
    pair.finish()
    assert parent.attempts == 2
    assert {i: pair.decode.outputs[i] for i in (1, 2)} == {i: WANTED[i] for i in (1, 2)}


def test_a_lost_transfer_after_the_first_tokens_is_made_good_here() -> None:
    seeds = [SHORT_SEED, *SEEDS[:2]]
    pair = Pair()
    pair.decode.add(0, PROMPT, 9, seeds, remote=True)
    pair.turn(share=0.5)
    pair.decode.step()
    assert set(pair.decode.outputs) == {0, 1, 2}
    pair.wire.lose()
    pair.finish()
    assert pair.decode.outputs == {i: answer(PROMPT, seed, 9, 64) for i, seed in enumerate(seeds)}


def test_long_answers_of_children_survive_preemption() -> None:
    seeds = [talkative(PROMPT, 14)] * 3
    engine = FakeEngine(num_blocks=10, max_len=24)
    engine.add(0, PROMPT, 14, seeds)
    engine.run()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.outputs == dict.fromkeys(range(3), answer(PROMPT, seeds[0], 14, 24))
