"""Tests which blocks a resumed request asks of its holders, what becomes of it, and what a holder gives."""

from __future__ import annotations

import pytest

from pdserve.engine.kv_cache.prefix_cache import extend_hashes
from pdserve.engine.kv_connector.cached_blocks import MAX_PUSHES, MAX_WAITING, POOL_SHARE
from pdserve.engine.request import Request, Status
from pdserve.wire.engine import FinishReason
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.events import (
    BlocksReleased,
    CachedFetchOrder,
    CachedWanted,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    PushCancelled,
    PushEnded,
    PushOutcome,
)
from tests.engine.kv_connector.test_connectors import BLOCK_SIZE, BOOT, NUM_BLOCKS, Bench
from tests.engine.whole_connector import LEASE_S
from tests.terms import PREPARE, made_terms

HOLDERS = tuple(PrefillTarget(f"h{i}", "tcp://127.0.0.1:1", new_id()) for i in range(2))


def hashes(token_ids: list[int], salt: str = "") -> tuple[bytes, ...]:
    made: list[bytes] = []
    extend_hashes(made, token_ids, len(token_ids) // BLOCK_SIZE, BLOCK_SIZE, salt)
    return tuple(made)


class Resumes(Bench):
    """A connector whose requests were begun by another node."""

    def resume(
        self,
        prompt: int = 6,
        emitted: int = 11,
        holders: int = 1,
        *,
        remote: bool = False,
        fetch_only: bool = False,
        deadline: float = 50.0,
    ) -> Request:
        made = Request(
            uuid=new_id(),
            token_ids=[7] * prompt + [8] * emitted,
            num_prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=30, seed=1),
            arrived=0.0,
            terms=made_terms(
                deadline,
                prefill=HOLDERS[:1] if remote else (),
                holders=HOLDERS[:holders],
                resume=PREPARE if fetch_only else None,
            ),
            local_id=1,
            num_emitted_tokens=emitted,
        )
        self.scheduler.add(made)
        return made

    @property
    def last_order(self) -> CachedFetchOrder:
        return self.thread.asked[-1]

    def landed(self, count: int) -> None:
        self.report(FetchLanded(self.last_order.transfer_id, 0.1, 100, landed=count))


def test_a_holder_is_asked_for_every_full_block_of_prompt_and_answer() -> None:
    bench = Resumes()
    request = bench.resume()
    assert bench.step().work == []
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    order = bench.last_order
    assert order.target == HOLDERS[0]
    assert order.hashes == hashes(request.token_ids)
    assert order.block_ids == tuple(request.block_table[:4])
    assert order.transfer_id.decode_boot == BOOT
    # The holder gets the lease, and 10 ms for each block of a megabyte.
    assert order.deadline_s == pytest.approx(LEASE_S + 4 * 0.01)
    bench.landed(4)
    # Only the last token is not in those blocks: its row gives the next one.
    (work,) = bench.step().work
    assert (work.request, work.num_tokens, work.replays) == (request, 1, False)
    assert (request.facts.reused_tokens, request.facts.cached_tokens) == (16, 6)
    counters = bench.scheduler.counters
    assert (counters.resume_blocks_wanted, counters.resume_blocks_reused) == (4, 4)


@pytest.mark.parametrize(("held", "computed"), [(0, 0), (1, 4), (3, 12)])
def test_the_next_holder_is_asked_for_what_the_first_one_lacks(held: int, computed: int) -> None:
    bench = Resumes()
    request = bench.resume(holders=2)
    bench.step()
    bench.landed(held)
    assert bench.step().work == []
    order = bench.last_order
    assert (order.target, order.hashes) == (HOLDERS[1], hashes(request.token_ids)[held:])
    assert order.block_ids == tuple(request.block_table[held:4])
    bench.landed(0)
    (work,) = bench.step().work
    # What nobody has is computed: first the prompt, then the answer, as rows.
    left = 17 - computed if computed >= 6 else 6 - computed
    assert (work.num_tokens, work.replays) == (left, computed >= 6)
    assert len(bench.thread.asked) == 2
    assert request.facts.reused_tokens == computed


def test_no_other_holder_is_asked_when_nothing_is_missing() -> None:
    bench = Resumes()
    request = bench.resume(holders=2)
    bench.step()
    bench.landed(4)
    assert bench.step().work[0].request is request
    assert len(bench.thread.asked) == 1


def test_blocks_that_are_here_are_not_asked_for() -> None:
    bench = Resumes()
    first = bench.resume(holders=0)
    for _ in range(3):
        bench.step()
    bench.scheduler.abort(first)
    second = bench.resume(prompt=6, emitted=19)
    bench.step()
    kept = second.num_computed_tokens // BLOCK_SIZE
    assert kept >= 4
    assert bench.last_order.hashes == hashes(second.token_ids)[kept:6]
    third = bench.resume(prompt=6, emitted=11)
    asked = len(bench.thread.asked)
    assert bench.step().work[0].request is third
    assert len(bench.thread.asked) == asked


def test_a_prompt_whose_holders_lack_it_goes_to_a_prefill_node() -> None:
    bench = Resumes()
    request = bench.resume(prompt=14, emitted=5, remote=True)
    bench.step()
    bench.landed(1)
    bench.step()
    (order,) = bench.thread.fetched
    assert (order.first_block, order.token_ids) == (1, [7] * 14)
    assert order.block_ids == tuple(request.block_table[1:4])


def test_a_prompt_that_came_whole_from_a_holder_goes_to_no_prefill_node() -> None:
    bench = Resumes()
    bench.resume(prompt=14, emitted=5, remote=True)
    bench.step()
    bench.landed(4)
    (work,) = bench.step().work
    assert (work.num_tokens, work.replays) == (3, True)
    assert bench.thread.fetched == []


@pytest.mark.parametrize("landed", [0, 2])
def test_a_lost_holder_leaves_what_has_landed(landed: int) -> None:
    bench = Resumes()
    request = bench.resume()
    bench.step()
    late = bench.last_order.block_ids[landed:3]
    bench.report(FetchFailed(bench.last_order.transfer_id, "gone", landed, late, FailureKind.PEER_LOST))
    assert request.num_computed_tokens == landed * BLOCK_SIZE
    assert not set(late) & set(request.block_table)
    assert bench.blocks.num_quarantined == len(late)
    assert bench.step().work[0].request is request
    bench.report(BlocksReleased(late))
    bench.scheduler.abort(request)
    assert bench.all_free


def test_what_has_landed_is_given_up_where_no_block_can_take_a_late_ones_place() -> None:
    bench = Resumes()
    table: list[int] = []
    request = bench.resume()
    bench.step()
    assert bench.blocks.grow(table, bench.blocks.num_free * BLOCK_SIZE)
    late = bench.last_order.block_ids[2:]
    bench.report(FetchFailed(bench.last_order.transfer_id, "gone", 2, late, FailureKind.PEER_LOST))
    assert (request.status, request.num_computed_tokens, request.block_table) == (Status.WAITING, 0, [])
    bench.scheduler.abort(request)
    bench.blocks.free(table)
    bench.report(BlocksReleased(late))
    assert bench.all_free


def test_a_client_that_leaves_cancels_the_fetch_once() -> None:
    bench = Resumes()
    request = bench.resume()
    bench.step()
    transfer, late = bench.last_order.transfer_id, bench.last_order.block_ids[1:2]
    bench.scheduler.abort(request)
    assert bench.thread.cancelled == [transfer]
    assert bench.blocks.num_free == NUM_BLOCKS - 5
    bench.report(FetchCancelled(transfer, late))
    assert bench.blocks.num_free == NUM_BLOCKS - 1
    bench.report(BlocksReleased(late))
    assert bench.all_free


def test_a_fetch_lasts_no_longer_than_its_request() -> None:
    bench = Resumes()
    bench.resume(deadline=2.5)
    bench.step()
    assert bench.last_order.deadline_s == 1.5


def test_each_choice_asks_for_its_own_blocks_behind_the_prompt() -> None:
    bench = Resumes()
    request = bench.resume(prompt=8, emitted=5)
    child = request.add_child(5, 2, [9] * 5)
    silent = request.add_child(6, 3)
    bench.step()
    bench.landed(3)
    assert (child.status, silent.status) == (Status.WAITING, Status.WAITING)
    bench.step()
    order = bench.last_order
    assert order.transfer_id != bench.thread.asked[0].transfer_id
    assert order.hashes == hashes([7] * 8 + [9] * 5)[2:3]
    bench.landed(1)
    assert {work.request for work in bench.step().work} == {request, child, silent}
    assert child.facts.reused_tokens == 12


def test_a_request_that_only_fetches_ends_without_a_token() -> None:
    bench = Resumes()
    request = bench.resume(fetch_only=True, holders=2)
    child = request.add_child(5, 2, [9] * 11)
    bench.scheduler._by_local_id[2] = child
    ended = []
    answered = 0
    for _ in range(10):
        bench.step()
        orders, answered = bench.thread.asked[answered:], len(bench.thread.asked)
        for order in orders:
            bench.report(FetchLanded(order.transfer_id, 0.1, 100, landed=min(2, len(order.hashes))))
        step = bench.collector.take()
        ended += step.outputs if step else []
        if not list(bench.scheduler.live()):
            break
    assert [(output.local_id, output.finish, output.new_token_ids) for output in ended] == [
        (1, FinishReason.LENGTH, []),
        (2, FinishReason.LENGTH, []),
    ]
    assert bench.scheduler.counters.prefills == dict.fromkeys(bench.scheduler.counters.prefills, 0)
    assert bench.scheduler.counters.prefix_cache_queries == 0
    assert bench.all_free
    # The real request finds everything.
    again = bench.resume(holders=0)
    assert bench.step().work[0].num_tokens == 1
    assert again.facts.reused_tokens == 16


def test_only_fetching_what_is_here_ends_at_once() -> None:
    bench = Resumes()
    request = bench.resume(fetch_only=True, holders=0)
    child = request.add_child(5, 2, [9] * 11)
    bench.scheduler._by_local_id[2] = child
    # No event follows, so the step in which the parent ends is the children's, too.
    assert bench.step().fetched == [request, child]
    assert bench.all_free
    assert bench.thread.asked == []


def test_without_a_prefix_cache_only_a_request_that_goes_on_asks_holders() -> None:
    bench = Resumes(prefix_cache=False)
    fetched, resumed = bench.resume(fetch_only=True), bench.resume()
    plan = bench.step()
    assert (plan.fetched, [reuse.request for reuse in plan.reuses]) == ([fetched], [resumed])
    assert len(bench.thread.asked) == 1
    bench.landed(4)
    assert bench.step().work[0].num_tokens == 1


# ---------------------------------------------------------------- holding


def wanted(names: tuple[bytes, ...]) -> CachedWanted:
    return CachedWanted(TransferId(new_id(), 0, new_id()), names, 5.0)


def hold(bench: Bench, token_ids: list[int]) -> list[int]:
    """Lets the prefix cache have idle blocks of these tokens, and returns them."""
    table: list[int] = []
    assert bench.blocks.grow(table, len(token_ids))
    for block, name in zip(table, hashes(token_ids), strict=True):
        bench.blocks.remember(block, name)
    held = list(table)
    bench.blocks.free(table)
    return held


def ends(bench: Bench, order: CachedWanted, table: list[int], request: Request) -> None:
    """Ends a push and what else holds blocks, and checks that all are free."""
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    bench.blocks.free(table)
    bench.scheduler.abort(request)
    assert bench.all_free


@pytest.mark.parametrize("outcome", PushOutcome)
def test_a_holder_gives_the_longest_prefix_that_it_has(outcome: PushOutcome) -> None:
    bench = Bench()
    held = hold(bench, [3] * 12)
    order = wanted(hashes([3] * 12 + [4] * 8))
    bench.report(order)
    assert bench.thread.pushed == [(0, tuple(held))]
    assert bench.thread.held_counts == [3]
    assert all(bench.blocks.num_holders(block) == 1 for block in held)
    bench.report(PushCancelled(order.transfer_id))
    assert all(bench.blocks.num_holders(block) == 1 for block in held)
    bench.report(PushEnded(order.transfer_id, outcome))
    assert bench.all_free
    assert bench.blocks.num_cached == 3


def test_a_holder_that_has_nothing_says_so() -> None:
    bench = Bench()
    hold(bench, [3] * 12)
    order = wanted(hashes([3] * 12, salt="another")[:3])
    bench.report(order)
    assert (bench.thread.pushed, bench.thread.held_counts) == ([], [0])
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    assert bench.all_free


def test_a_running_requests_full_blocks_are_given_too() -> None:
    bench = Bench()
    request = bench.request(prompt=10, targets=0)
    for _ in range(3):
        bench.step()
    order = wanted(hashes(request.token_ids[: request.num_computed_tokens]))
    bench.report(order)
    assert bench.thread.pushed == [(0, tuple(request.block_table[:2]))]
    bench.scheduler.abort(request)
    assert bench.blocks.num_free == NUM_BLOCKS - 2
    bench.report(PushEnded(order.transfer_id, PushOutcome.LEASE_EXPIRED))
    assert bench.all_free


def test_idle_blocks_that_running_requests_may_need_are_not_held() -> None:
    bench = Bench()
    request = bench.request(prompt=10, targets=0)
    bench.step()
    table: list[int] = []
    held = hold(bench, [3] * 12)
    assert bench.blocks.grow(table, (bench.blocks.num_free - 3) * BLOCK_SIZE)
    order = wanted(hashes([3] * 12))
    bench.report(order)
    assert bench.thread.pushed == [(0, tuple(held[:2]))]
    assert bench.thread.held_counts == [2]
    assert bench.blocks.num_free == bench.scheduler.num_running == 1
    ends(bench, order, table, request)


def test_a_full_node_gives_what_its_requests_hold() -> None:
    bench = Bench()
    table: list[int] = []
    request = bench.request(prompt=10, targets=0)
    bench.step()
    assert bench.blocks.grow(table, bench.blocks.num_free * BLOCK_SIZE)
    order = wanted(hashes(request.token_ids))
    bench.report(order)
    assert bench.thread.pushed == [(0, tuple(request.block_table[:2]))]
    assert bench.thread.held_counts == [2]
    ends(bench, order, table, request)


def test_idle_blocks_that_waiting_requests_need_are_not_held() -> None:
    bench = Bench()
    table: list[int] = []
    held = hold(bench, [3] * 12)
    assert bench.blocks.grow(table, (bench.blocks.num_free - 4) * BLOCK_SIZE)
    waiting = bench.request(prompt=10, targets=0)
    order = wanted(hashes([3] * 12))
    bench.report(order)
    assert bench.thread.pushed == [(0, tuple(held[:1]))]
    assert bench.step().work[0].request is waiting
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    bench.blocks.free(table)
    bench.scheduler.abort(waiting)
    assert bench.all_free


def test_all_pushes_together_hold_a_share_of_the_idle_blocks() -> None:
    bench = Bench()
    most = NUM_BLOCKS // POOL_SHARE
    first, second = [3] * 4 * (most - 1), [5] * 8
    hold(bench, first)
    hold(bench, second)
    orders = [wanted(hashes(first)), wanted(hashes(second)), wanted(hashes(first))]
    bench.report(*orders)
    assert bench.thread.held_counts == [most - 1, 1, most - 1]
    assert bench.blocks.num_free == NUM_BLOCKS - most
    bench.report(*(PushEnded(order.transfer_id, PushOutcome.DONE) for order in orders))
    assert bench.all_free


def test_a_holder_gives_to_few_at_a_time_and_the_others_wait_for_their_turn() -> None:
    bench = Bench()
    hold(bench, [3] * 12)
    orders = [wanted(hashes([3] * 12)) for _ in range(MAX_PUSHES + 3)]
    bench.report(*orders)
    assert len(bench.thread.held_counts) == MAX_PUSHES
    *first, gives_up, cancels, waits = orders
    bench.report(PushEnded(gives_up.transfer_id, PushOutcome.LEASE_EXPIRED), PushCancelled(cancels.transfer_id))
    bench.report(PushEnded(cancels.transfer_id, PushOutcome.CANCELLED))
    assert len(bench.thread.held_counts) == MAX_PUSHES
    bench.report(PushEnded(first[0].transfer_id, PushOutcome.DONE))
    assert len(bench.thread.held_counts) == MAX_PUSHES + 1
    assert bench.thread.causes == []
    bench.report(*(PushEnded(order.transfer_id, PushOutcome.DONE) for order in (*first[1:], waits)))
    assert bench.all_free


def test_a_holder_lets_only_so_many_wait() -> None:
    bench = Bench()
    hold(bench, [3] * 12)
    orders = [wanted(hashes([3] * 12)) for _ in range(MAX_PUSHES + MAX_WAITING + 1)]
    bench.report(*orders)
    assert bench.thread.causes == [FailureCause.LOAD]
    bench.report(PushEnded(orders[-1].transfer_id, PushOutcome.FAILED))
    bench.report(*(PushEnded(order.transfer_id, PushOutcome.DONE) for order in orders[:-1]))
    assert len(bench.thread.held_counts) == MAX_PUSHES + MAX_WAITING
    assert bench.all_free


def test_a_node_without_a_prefix_cache_holds_nothing() -> None:
    bench = Bench(prefix_cache=False)
    request = bench.request(prompt=10, targets=0)
    bench.step()
    bench.report(wanted(hashes(request.token_ids)))
    assert bench.thread.held_counts == [0]
