"""Tests the scheduler alone: a fake model gives tokens, and time is a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import Batching, SchedulerConfig
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.placement.placement import Placement
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.output_collector import OutputCollector
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.cache_groups import GroupBlocks
from pdserve.wire.engine import FinishReason, RequestOutput
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget
from tests.engine.placements import make_placement
from tests.examples import examples
from tests.terms import made_terms

EOS = 2
BLOCK_SIZE = 4
TARGET = PrefillTarget("p0", "tcp://127.0.0.1:1", new_id())


class Bench:
    """A scheduler whose model answers ``10 + len(tokens)``, so that a recomputed answer must be the same."""

    def __init__(
        self,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_len: int = 64,
        batching: Batching = Batching.CONTINUOUS,
        placement: Placement | None = None,
        groups: Sequence[GroupBlocks] = (),
    ) -> None:
        """``groups`` are the cache groups of the model, of which the first has ``num_blocks``."""
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, bounded=groups[1:])
        self.collector = OutputCollector()
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_waiting=100, batching=batching
        )
        stop = StopRule(frozenset({EOS}), max_len)
        self.scheduler = Scheduler(
            self.blocks,
            config,
            stop,
            self.collector,
            lambda request: self.blocks.free(request.block_table),
            placement or make_placement(BLOCK_SIZE),
        )
        self.outputs: dict[int, list[int]] = {}
        self.endings: dict[int, RequestOutput] = {}
        self.now = 0.0

    def add(
        self,
        local_id: int,
        prompt: int,
        max_tokens: int = 4,
        targets: tuple[PrefillTarget, ...] = (),
        group_id: int | bytes = b"",
        emitted: int = 0,
    ) -> Request:
        request = Request(
            uuid=new_id(),
            token_ids=[100] * prompt + expected(prompt, emitted),
            num_prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=0),
            arrived=self.now,
            terms=made_terms(100, prefill=targets),
            local_id=local_id,
            group_id=group_id,
            num_emitted_tokens=emitted,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> BatchPlan:
        self.now += 1
        plan = self.scheduler.schedule(self.now)
        planned = {work.request: work.request.num_computed_tokens + work.num_tokens for work in plan.work}
        for request, computed in planned.items():
            assert len(request.block_table) * BLOCK_SIZE >= computed
        tokens = [SampledToken(10 + len(request.token_ids)) for request in plan.sampled_requests]
        self.scheduler.postprocess(plan, tokens, self.now)
        self.collect()
        return plan

    def collect(self) -> None:
        step = self.collector.take()
        for output in step.outputs if step else []:
            self.outputs.setdefault(output.local_id, []).extend(output.new_token_ids)
            if output.finish is not None:
                assert output.local_id not in self.endings
                self.endings[output.local_id] = output

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.step().work:
                return
        raise AssertionError("the scheduler does not come to an end")


def sizes(plan: BatchPlan) -> list[int]:
    return [work.num_tokens for work in plan.work]


def expected(prompt: int, max_tokens: int) -> list[int]:
    return [10 + prompt + i for i in range(max_tokens)]


def test_a_long_prompt_goes_in_chunks_and_only_the_last_gives_a_token() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add(1, prompt=40, max_tokens=2)
    assert [sizes(bench.step()) for _ in range(2)] == [[16], [16]]
    assert bench.outputs == {}
    assert sizes(bench.step()) == [8]
    assert bench.outputs == {1: [50]}


@pytest.mark.parametrize(("prompt", "chunks"), [(17, [15, 2]), (18, [16, 2]), (33, [16, 15, 2]), (1, [1]), (16, [16])])
def test_no_chunk_of_a_prompt_has_a_single_token(prompt: int, chunks: list[int]) -> None:
    bench = Bench(num_blocks=64, max_num_batched_tokens=16)
    bench.add(1, prompt=prompt, max_tokens=1)
    assert [sizes(bench.step()) for _ in chunks] == [[tokens] for tokens in chunks]
    assert bench.outputs == {1: expected(prompt, 1)}


@pytest.mark.parametrize(("first", "left"), [(15, []), (14, []), (13, [2]), (12, [4])])
def test_a_prompt_waits_for_a_step_that_has_more_than_two_tokens_for_it(first: int, left: list[int]) -> None:
    """A chunk of one token would pass the kernel of rows, whose bits depend on what else is in the step."""
    bench = Bench(num_blocks=64, max_num_batched_tokens=16)
    bench.add(1, prompt=first, max_tokens=1)
    bench.add(2, prompt=4, max_tokens=1)
    assert sizes(bench.step()) == [first, *left]
    bench.run()
    assert bench.outputs == {1: expected(first, 1), 2: expected(4, 1)}


def test_a_step_of_two_tokens_computes_a_prompt_that_is_alone() -> None:
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=2)
    bench.add(1, prompt=5, max_tokens=2)
    bench.run()
    assert bench.outputs == {1: expected(5, 2)}


@pytest.mark.parametrize(("landed", "kept"), [(8, 8), (12, 8), (13, 13)])
def test_a_fetch_that_leaves_a_single_token_of_a_prompt_gives_up_its_last_block(landed: int, kept: int) -> None:
    """Blocks have four tokens, and the prompt has 13."""
    bench = Bench(num_blocks=64, max_num_batched_tokens=16)
    request = bench.add(1, 13, 2, (TARGET,))
    bench.step()
    if landed == 13:
        bench.scheduler.accept_token(request, SampledToken(23), bench.now)
    request.attempts = len(request.terms.prefill)
    bench.scheduler.requeue(request, landed)
    assert request.num_computed_tokens == kept
    bench.run()
    assert bench.outputs == {1: expected(13, 2)}


def test_decoding_comes_before_prompts_and_shares_their_budget() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add(1, prompt=3, max_tokens=8)
    bench.step()
    bench.add(2, prompt=40)
    plan = bench.step()
    assert [(work.request.local_id, work.num_tokens) for work in plan.work] == [(1, 1), (2, 15)]


@settings(max_examples=examples(60))
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(6, 20))
def test_a_decoding_request_never_waits_for_a_prompt(prompts: list[int], budget: int) -> None:
    """Every request that decodes gets a token in every step, whatever prompts are being computed."""
    bench = Bench(num_blocks=200, max_num_batched_tokens=budget)
    for local_id, prompt in enumerate(prompts):
        bench.add(local_id, prompt, max_tokens=8)
        bench.now += 1
        plan = bench.scheduler.schedule(bench.now)
        decoding = {request for request in bench.scheduler.live() if request.num_generated_tokens}
        assert decoding <= {work.request for work in plan.work}
        assert sum(sizes(plan)) <= budget
        tokens = [SampledToken(10 + len(request.token_ids)) for request in plan.sampled_requests]
        bench.scheduler.postprocess(plan, tokens, bench.now)
    bench.run()
    assert len(bench.endings) == len(prompts)


def test_a_static_batch_is_prefilled_first_and_no_request_joins_it() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=3, batching=Batching.STATIC)
    for local_id, max_tokens in enumerate((2, 9, 4)):
        bench.add(local_id, prompt=10, max_tokens=max_tokens)
    assert sizes(bench.step()) == [8]
    bench.add(3, prompt=10, max_tokens=2)
    # Thirty tokens of prompts, eight a step; no request decodes before all of them are computed.
    for _ in range(3):
        assert all(work.request.num_generated_tokens == 0 or work.num_tokens > 1 for work in bench.step().work)
    while len(bench.endings) < 3:
        plan = bench.step()
        assert {work.request.local_id for work in plan.work} <= {0, 1, 2}
        assert set(sizes(plan)) == {1}
    assert 0 in bench.endings
    bench.run()
    assert bench.outputs == {0: expected(10, 2), 1: expected(10, 9), 2: expected(10, 4), 3: expected(10, 2)}


def test_single_tokens_come_first_in_a_plan() -> None:
    bench = Bench(max_num_batched_tokens=16)
    bench.add(1, prompt=6)
    bench.add(2, prompt=1)
    assert sizes(bench.step()) == [1, 6]


def test_answers_end_at_max_tokens_eos_and_context_length() -> None:
    bench = Bench(max_len=12)
    bench.add(1, prompt=3, max_tokens=2)
    bench.add(2, prompt=10, max_tokens=50)
    bench.run()
    assert bench.endings[1].finish is FinishReason.LENGTH
    assert bench.outputs[1] == expected(3, 2)
    assert bench.endings[2].finish is FinishReason.LENGTH
    assert bench.outputs[2] == expected(10, 2)
    request = bench.add(3, prompt=3)
    plan = bench.scheduler.schedule(bench.now)
    bench.scheduler.postprocess(plan, [SampledToken(EOS)], bench.now)
    bench.collect()
    assert bench.endings[3].finish is FinishReason.STOP
    assert request.status is Status.FINISHED
    assert bench.blocks.num_free == 32


def test_no_more_than_max_running() -> None:
    bench = Bench(max_num_seqs=2)
    for local_id in range(4):
        bench.add(local_id, prompt=2)
    bench.step()
    assert bench.scheduler.num_running == 2
    assert bench.scheduler.num_waiting == 2


def test_preempted_answers_are_unchanged() -> None:
    bench = Bench(num_blocks=6, max_len=24)
    for local_id in range(3):
        bench.add(local_id, prompt=4, max_tokens=16)
    bench.run()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.outputs == {local_id: expected(4, 16) for local_id in range(3)}
    assert bench.blocks.num_free == 6


def test_the_youngest_is_preempted() -> None:
    bench = Bench(num_blocks=6, max_len=24)
    old, young = bench.add(1, prompt=4, max_tokens=16), bench.add(2, prompt=4, max_tokens=16)
    while not bench.scheduler.counters.preemptions:
        bench.step()
    assert old.status is Status.RUNNING
    assert young.status is Status.WAITING


def test_a_remote_prompt_reserves_blocks_and_waits() -> None:
    bench = Bench()
    request = bench.add(1, prompt=10, targets=(TARGET,))
    plan = bench.step()
    assert plan.fetches == [request]
    assert not plan.work
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    assert len(request.block_table) == 3
    bench.scheduler.accept_token(request, SampledToken(20), bench.now)
    bench.collect()
    assert bench.outputs == {1: [20]}
    bench.scheduler.landed(request)
    assert sizes(bench.step()) == [1]
    assert bench.outputs == {1: [20, 21]}


def test_remote_prompts_do_not_use_the_step_budget() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add(1, prompt=4)
    remote = bench.add(2, prompt=30, targets=(TARGET,))
    plan = bench.step()
    assert sizes(plan) == [4]
    assert plan.fetches == [remote]


def test_a_failed_fetch_goes_on_from_what_landed() -> None:
    bench = Bench()
    request = bench.add(1, prompt=10, targets=(TARGET,))
    bench.step()
    request.attempts = len(request.terms.prefill)
    bench.scheduler.requeue(request, computed_tokens=8)
    assert sizes(bench.step()) == [2]
    assert bench.outputs == {1: [20]}


def test_a_failed_fetch_after_the_first_token_does_not_repeat_it() -> None:
    bench = Bench()
    request = bench.add(1, prompt=10, targets=(TARGET, TARGET))
    bench.step()
    bench.scheduler.accept_token(request, SampledToken(20), bench.now)
    bench.scheduler.requeue(request, computed_tokens=0)
    assert sizes(bench.step()) == [10]
    assert bench.outputs == {1: [20]}
    assert sizes(bench.step()) == [1]
    assert bench.outputs == {1: [20, 21]}


def test_failed_fetches_that_hold_all_blocks_do_not_deadlock() -> None:
    bench = Bench(num_blocks=4, max_len=16)
    first = bench.add(1, prompt=8, targets=(TARGET,))
    second = bench.add(2, prompt=8, targets=(TARGET,))
    assert bench.step().fetches == [first, second]
    for request in (first, second):
        request.attempts = len(request.terms.prefill)
        bench.scheduler.accept_token(request, SampledToken(18), bench.now)
        bench.scheduler.requeue(request, computed_tokens=4)
    bench.run()
    assert bench.outputs == {1: expected(8, 4), 2: expected(8, 4)}
    assert bench.blocks.num_free == 4


def test_failed_fetches_are_queued_by_arrival_before_newer_requests() -> None:
    bench = Bench()
    remote = []
    for local_id in range(3):
        bench.now = float(local_id)
        remote.append(bench.add(local_id, prompt=8, targets=(TARGET,)))
    bench.step()
    bench.now = 50.0
    bench.add(9, prompt=4)
    for request in remote:
        request.attempts = len(request.terms.prefill)
        bench.scheduler.requeue(request, computed_tokens=0)
    plan = bench.scheduler.schedule(bench.now)
    assert [work.request.local_id for work in plan.work] == [0, 1]
    assert [request.local_id for request in bench.scheduler.live()][:2] == [2, 9]


def test_blocks_of_waiting_requests_go_before_running_ones_are_preempted() -> None:
    bench = Bench(num_blocks=4, max_len=16, max_num_batched_tokens=1)
    running = bench.add(1, prompt=3, max_tokens=9)
    while running.num_generated_tokens == 0:
        bench.step()
    failed = bench.add(2, prompt=8, targets=(TARGET,))
    bench.step()
    failed.attempts = 1
    bench.scheduler.requeue(failed, computed_tokens=8)
    bench.run()
    assert bench.outputs == {1: expected(3, 9), 2: expected(8, 4)}
    assert bench.scheduler.counters.preemptions == 0


def test_fetches_do_not_wait_behind_a_local_prompt_without_budget() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add(1, prompt=20)
    bench.step()
    bench.add(2, prompt=20)
    remote = bench.add(3, prompt=20, targets=(TARGET,))
    assert bench.step().fetches == [remote]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_frees_everything_and_says_nothing(steps: int) -> None:
    bench = Bench()
    request = bench.add(1, prompt=20, max_tokens=9)
    for _ in range(steps):
        bench.step()
    bench.outputs.clear()
    bench.scheduler.abort(request)
    bench.scheduler.abort(request)
    bench.collect()
    assert bench.outputs == {}
    assert bench.endings == {}
    assert bench.blocks.num_free == 32
    assert list(bench.scheduler.live()) == []


def test_a_request_ends_once() -> None:
    bench = Bench()
    request = bench.add(1, prompt=2)
    bench.scheduler.finish(request, FinishReason.DEADLINE)
    bench.scheduler.finish(request, FinishReason.ERROR, "late")
    bench.collect()
    assert bench.endings[1].finish is FinishReason.DEADLINE
    with pytest.raises(EngineError, match="cannot go from FINISHED"):
        request.move(Status.RUNNING)


def test_expired_lists_waiting_and_running() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(1, prompt=2)
    bench.add(2, prompt=2)
    bench.step()
    assert bench.scheduler.next_deadline() == 100
    assert bench.scheduler.expired(99) == []
    assert {request.local_id for request in bench.scheduler.expired(100)} == {1, 2}


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans()), min_size=1, max_size=10),
    st.integers(8, 30),
    st.integers(1, 5),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_every_request_is_answered_whatever_happens(
    requests: Iterable[tuple[int, int, bool]], num_blocks: int, max_num_seqs: int, budget: int, random: object
) -> None:
    """With few blocks, and fetches that fail or land in any order, all answers are right and all blocks come back."""
    choose = getattr(random, "choice")  # noqa: B009  # hypothesis hides the type of its Random
    max_len = min(num_blocks * BLOCK_SIZE, 42)
    bench = Bench(num_blocks, max_num_seqs, budget, max_len)
    wanted = {}
    for local_id, (asked, max_tokens, remote) in enumerate(requests):
        prompt = min(asked, max_len - 1)
        bench.add(local_id, prompt, max_tokens, (TARGET,) if remote else ())
        wanted[local_id] = expected(prompt, min(max_tokens, max_len - prompt))
    fetching: list[Request] = []
    for _ in range(3000):
        plan = bench.step()
        for request in plan.fetches:
            request.attempts = len(request.terms.prefill)
        fetching += plan.fetches
        if fetching and (not plan.work or choose([True, False])):
            request = fetching.pop(choose(range(len(fetching))))
            outcome = choose(["landed", "lost", "lost after first token"])
            if outcome != "lost":
                bench.scheduler.accept_token(request, SampledToken(10 + len(request.token_ids)), bench.now)
            if request.status is Status.FINISHED:
                pass
            elif outcome == "landed":
                bench.scheduler.landed(request)
            else:
                bench.scheduler.requeue(request, choose([0, 1, 2]) * BLOCK_SIZE)
        elif not plan.work:
            break
    bench.collect()
    assert bench.outputs == wanted
    assert set(bench.endings) == set(wanted)
    assert bench.blocks.num_free == num_blocks
