"""Tests that prompts which wait for a slow prefill node take no place in the batch."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.config import Disaggregation
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.placement_rule import PlacementDecision, PromptSize
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request, Status
from pdserve.wire.sampling_params import NUMBER_BYTES, SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import PrefillLoad
from tests.engine.placements import make_placement
from tests.engine.scheduling.test_scheduler import BLOCK_SIZE, TARGET, Bench, expected
from tests.terms import PREPARE, change_terms


def add(
    bench: Bench, local_id: int, prompt: int, max_tokens: int = 4, *, remote: bool = False, group_id: int = 0
) -> Request:
    """Adds a request whose prompt the prefix cache has nothing of."""
    request = bench.add(local_id, prompt, max_tokens, (TARGET,) if remote else (), group_id or b"")
    request.token_ids[:] = [1000 + local_id] * prompt
    return request


def land(bench: Bench, request: Request) -> None:
    """Lets a request's blocks and first token arrive."""
    bench.scheduler.accept_token(request, SampledToken(10 + len(request.token_ids)), bench.now)
    bench.scheduler.landed(request)


def test_local_prompts_are_admitted_while_more_than_a_batch_waits_for_remote_ones() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=2)
    waiters = [add(bench, local_id, 10, remote=True) for local_id in range(6)]
    assert bench.step().fetches == waiters[:2]
    add(bench, 7, 10)
    assert [work.request.local_id for work in bench.step().work] == [7]
    bench.run()
    assert bench.outputs == {7: expected(10, 4)}
    assert (bench.scheduler.num_remote, bench.scheduler.num_waiting) == (2, 4)


def test_a_prompt_whose_log_probabilities_fit_into_no_message_is_computed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.wire.sampling_params.MAX_SENT_BYTES", 10 * 2 * NUMBER_BYTES)
    bench = Bench(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)
    fitting, plain, larger = [add(bench, i, length, remote=True) for i, length in enumerate((10, 11, 11))]
    for request in (fitting, larger):
        request.sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=0)
    plan = bench.step()
    assert plan.fetches == [fitting, plain]
    assert [work.request for work in plan.work] == [larger]


def test_the_batch_is_not_exceeded_when_all_land_at_once() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=3, max_num_batched_tokens=32)
    waiters = [add(bench, local_id, 10, remote=True) for local_id in range(3)]
    bench.step()
    for local_id in (3, 4):
        add(bench, local_id, 10)
    bench.step()
    tables = [list(request.block_table) for request in waiters]
    for request in waiters:
        land(bench, request)
    assert [request.status for request in waiters] == [Status.RUNNING] + [Status.WAITING] * 2
    assert [request.block_table for request in waiters] == tables, "they keep what they have"
    while list(bench.scheduler.live()):
        plan = bench.step()
        assert bench.scheduler.num_running <= 3 and plan.num_prompt_tokens == 0, "nothing is computed again"
    assert bench.outputs == {local_id: expected(10, 4) for local_id in range(5)}
    assert bench.blocks.num_free == 64


def test_one_that_landed_comes_before_those_that_came_later() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=1)
    waiter = add(bench, 1, 10, remote=True)
    bench.step()
    running = add(bench, 0, 10, max_tokens=3)
    bench.step()
    later = add(bench, 2, 10)
    land(bench, waiter)
    assert (waiter.status, later.status) == (Status.WAITING, Status.WAITING)
    while running.status is Status.RUNNING:
        bench.step()
    assert [work.request for work in bench.step().work] == [waiter]
    bench.run()
    assert bench.outputs == {0: expected(10, 3), 1: expected(10, 4), 2: expected(10, 4)}


def test_what_landed_gives_way_to_a_batch_that_needs_its_blocks_and_is_computed_here() -> None:
    bench = Bench(num_blocks=7, max_num_seqs=1)
    waiter = add(bench, 1, 12, remote=True)
    bench.step()
    add(bench, 0, 10, max_tokens=8)
    bench.step()
    land(bench, waiter)
    assert waiter.status is Status.WAITING
    bench.run()
    assert bench.outputs == {0: expected(10, 8), 1: expected(12, 4)}
    assert bench.blocks.num_free == 7


@pytest.mark.parametrize("ended", [False, True])
def test_children_of_one_that_landed_without_a_place_wait_with_it(ended: bool) -> None:
    bench = Bench(num_blocks=64, max_num_seqs=1)
    parent = add(bench, 1, 2 * BLOCK_SIZE + 1, remote=True)
    child = parent.add_child(seed=5, local_id=2)
    bench.scheduler._by_local_id[2] = child
    bench.step()
    add(bench, 0, 10, max_tokens=6)
    bench.step()
    bench.scheduler.accept_token(child, SampledToken(10 + len(child.token_ids)), bench.now)
    if ended:
        bench.scheduler.abort(parent)
        bench.scheduler.landed(parent)
    else:
        land(bench, parent)
    assert child.status is Status.WAITING
    bench.run()
    answers = {0: expected(10, 6), 2: expected(9, 4)} | ({} if ended else {1: expected(9, 4)})
    assert bench.outputs == answers
    assert bench.blocks.num_free == 64


def test_as_many_as_the_batch_holds_may_be_on_their_way_or_wait_for_a_place() -> None:
    bench = Bench(num_blocks=1024, max_num_seqs=2)
    waiters = [add(bench, local_id, 10, remote=True) for local_id in range(200)]
    assert bench.step().fetches == waiters[:2]
    shorts = [add(bench, local_id, 1, max_tokens=20, remote=True) for local_id in (200, 201)]
    assert bench.step().work == [], "the search for prompts of this node ends somewhere"
    for request in waiters[10:200]:
        bench.scheduler.abort(request)
    assert [work.request.local_id for work in bench.step().work] == [200, 201], "they are short"
    land(bench, waiters[0])
    assert bench.step().fetches == []
    bench.scheduler.abort(waiters[0])
    for request in shorts:
        bench.scheduler.abort(request)
    assert bench.step().fetches == [waiters[2]]


def with_two_places(bench: Bench) -> tuple[list[Request], list[Request]]:
    """Two prompts of one client request fill the batch, and two are fetched."""
    fetched = [add(bench, local_id, 10, remote=True, group_id=1) for local_id in (0, 1)]
    bench.step()
    running = [add(bench, local_id, 10, max_tokens=40, group_id=1) for local_id in (2, 3)]
    bench.step()
    assert [request.status for request in running] == [Status.RUNNING] * 2
    return running, fetched


def test_a_place_that_is_given_up_goes_to_who_has_none_and_not_to_one_that_landed() -> None:
    bench = Bench(num_blocks=128, max_num_seqs=2, max_num_batched_tokens=64)
    running, fetched = with_two_places(bench)
    for request in fetched:
        land(bench, request)
    other = add(bench, 10, 10)
    bench.step()
    assert other.status is Status.RUNNING
    assert [request.status for request in (*running, *fetched)] == [Status.RUNNING] + [Status.WAITING] * 3
    assert bench.scheduler.counters.preemptions == 1
    bench.run()
    assert set(bench.outputs) == {0, 1, 2, 3, 10}
    assert bench.blocks.num_free == 128


def test_no_request_is_preempted_for_one_that_waits_until_its_prompt_can_be_ordered() -> None:
    bench = Bench(num_blocks=128, max_num_seqs=2, max_num_batched_tokens=64)
    running, _ = with_two_places(bench)
    remote = add(bench, 10, 10, remote=True)
    bench.step()
    assert [request.status for request in (*running, remote)] == [Status.RUNNING] * 2 + [Status.WAITING]
    short = add(bench, 11, 3, remote=True)
    bench.step()
    assert short.status is Status.RUNNING, "it comes later, but is computed here"
    assert bench.scheduler.counters.preemptions == 1


def only_fetch(bench: Bench, local_id: int, prompt: int) -> Request:
    request = add(bench, local_id, prompt)
    change_terms(request, holders=(TARGET,), resume=PREPARE)
    return request


def test_what_is_only_fetched_waits_for_spare_blocks_and_holds_up_no_other_request() -> None:
    bench = Bench(num_blocks=12)
    first = add(bench, 0, 16, max_tokens=8)
    bench.step()
    fetched = only_fetch(bench, 1, 36)
    later = add(bench, 2, 4)
    wanted = bench.scheduler.blocks_wanted
    plan = bench.step()
    assert ({work.request for work in plan.work}, plan.reuses) == ({first, later}, [])
    assert wanted == [2], "no other fetch makes room for it"
    while not plan.reuses:
        assert plan.work
        plan = bench.step()
    assert [reuse.request for reuse in plan.reuses] == [fetched]
    assert bench.outputs == {0: expected(16, 8), 2: expected(4, 4)}


def test_what_is_only_fetched_does_not_keep_a_client_request_from_its_place() -> None:
    bench = Bench(num_blocks=12, max_num_seqs=2)
    for local_id in range(2):
        add(bench, local_id, 8, max_tokens=20, group_id=1)
    bench.step()
    only_fetch(bench, 2, 36)
    other = add(bench, 3, 8, group_id=3)
    bench.step()
    assert bench.scheduler.counters.preemptions == 1
    bench.step()
    assert other.status is Status.RUNNING


RATE = 2000.0


def measured(decode_step_s: float, remote_rate: float = RATE) -> Placement:
    """Returns a placement that knows this node and ``TARGET``."""
    step_cost = StepCost()
    step_cost.observe(0, 0, 256, 256 / RATE)
    step_cost.observe(1, 10, 0, decode_step_s)
    placement = make_placement(BLOCK_SIZE, Disaggregation.AUTO, step_cost)
    seconds = 256 / remote_rate
    placement.ordered(TARGET, "first", 256, 0, -seconds).answered("first", 0, PrefillLoad(0, remote_rate), 0.0)
    return placement


def test_a_short_prompt_that_waits_for_the_prefill_node_is_not_overtaken_by_a_long_one() -> None:
    """Its target is 64 ms and the long one's 8 s, while the prefill node is busy for half a second."""
    placement = measured(decode_step_s=5.0)
    bench = Bench(num_blocks=4096, max_len=9000, max_num_batched_tokens=256, placement=placement)
    add(bench, 0, 4, max_tokens=50)
    assert bench.step().work
    short, long = add(bench, 1, 64, remote=True), add(bench, 2, 8000, remote=True)
    placement.ordered(TARGET, "ahead", 1024, 0, 1.0)
    for now in (1.01, 1.2):
        bench.now = now - 1
        assert bench.step().fetches == []
    # Less than two full steps' work is left there, so that it would soon have nothing to do.
    bench.now = 1.3 - 1
    assert bench.step().fetches == [short, long]


def test_the_search_ends_among_prompts_that_are_for_this_node_when_it_can_compute_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement, placed = measured(decode_step_s=0.01, remote_rate=RATE / 100), 0
    decide = placement.decide

    def counted(prompt: PromptSize, target: PrefillTarget, now: float) -> PlacementDecision:
        nonlocal placed
        placed += 1
        return decide(prompt, target, now)

    monkeypatch.setattr(placement, "decide", counted)
    bench = Bench(num_blocks=8192, max_num_seqs=512, placement=placement)
    for local_id in range(300):
        add(bench, local_id, 10, remote=True, group_id=local_id + 1)
    plan = bench.step()
    assert [work.num_tokens for work in plan.work] == [10, 6] and plan.fetches == []
    assert placed < 50
