"""Tests which blocks are offered and which are fetched, and that no return takes a block from live work."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pdserve.engine.kv_cache.prefix_cache import Match
from pdserve.engine.kv_connector import kv_return
from pdserve.engine.kv_connector.kv_return import (
    MAX_AHEAD_S,
    MAX_FETCHES,
    MAX_WAITING,
    OFFER_S,
    POOL_SHARE,
    RETURNS_PER_S,
    ReturnOffers,
    together,
)
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan, Work
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.events import (
    BlocksOffered,
    BlocksReleased,
    CachedFetchOrder,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
)
from tests.engine.kv_connector.test_connectors import BLOCK_SIZE, NUM_BLOCKS, Bench, ScriptedThread
from tests.engine.kv_connector.test_reuse import hashes, hold
from tests.terms import change_terms, made_terms

PREFILL = PrefillTarget("p", "tcp://127.0.0.1:1", new_id())
DECODE = PrefillTarget("d", "tcp://127.0.0.1:2", new_id())


class Decoding(Bench):
    """A decode node whose clock a test turns."""

    now = 0.0

    def turn(self, count: int = 1, pause_s: float = OFFER_S) -> None:
        for _ in range(count):
            self.now += pause_s
            plan = self.scheduler.schedule(self.now)
            self.connector.start(plan, self.now)
            self.scheduler.postprocess(plan, [SampledToken(50) for _ in plan.sampled_requests], self.now)
            self.connector.stepped(self.scheduler, plan, self.now)

    def begin(self, prompt: int = 6, max_tokens: int = 40) -> Request:
        request = self.request(prompt=prompt, targets=0, max_tokens=max_tokens)
        change_terms(request, prefill=(PREFILL,))
        request.attempts = 1  # the prompt is computed here
        return request

    @property
    def offers(self) -> list[int]:
        """Returns how many blocks each offer has named."""
        return [len(names) for _, names in self.thread.offered]


def test_what_has_become_full_is_offered_from_the_first_block_on() -> None:
    bench = Decoding()
    request = bench.begin()
    bench.turn(12)
    assert bench.thread.offered[0] == (PREFILL, hashes(request.token_ids)[:1])
    assert bench.offers == [1, 2, 3, 4]
    assert bench.thread.offered[-1][1] == hashes(request.token_ids)[:4]


def test_offers_are_made_at_times_and_at_the_end() -> None:
    bench = Decoding()
    request = bench.begin()
    bench.turn(11, pause_s=OFFER_S / 4)
    assert bench.offers == [1, 2, 3]
    bench.turn(2, pause_s=0)
    bench.scheduler.abort(request)
    assert bench.offers == [1, 2, 3, 4]
    assert bench.all_free


def streaming(computed: int) -> Request:
    """Returns a request that decodes, of whose 9 tokens so many are in the KV cache."""
    stream = Request(
        new_id(), [3] * 9, 1, SamplingParams(max_tokens=50, seed=0), 0.0, made_terms(50.0, prefill=(PREFILL,))
    )
    stream.num_computed_tokens, stream.block_hashes = computed, list(hashes([3] * 9))
    return stream


def test_many_streams_are_offered_less_often() -> None:
    offers = ReturnOffers(thread := cast(Any, ScriptedThread()), BLOCK_SIZE)
    streams = [streaming(4) for _ in range(40)]
    plan = BatchPlan([Work(stream, 1) for stream in streams])
    offers.stepped(plan, 1.0)
    assert len(thread.offered) == len(streams)
    for stream in streams:
        stream.num_computed_tokens = 8
    offers.stepped(plan, 1.0 + together(len(streams)) / RETURNS_PER_S - 0.01)
    assert len(thread.offered) == len(streams)
    offers.stepped(plan, 1.0 + together(len(streams)) / RETURNS_PER_S)
    assert len(thread.offered) == 2 * len(streams)


def test_texts_that_are_offered_together_cost_less() -> None:
    assert [together(texts) for texts in (0, 1, 4)] == [0, 1, 4], "they may be fetched one by one"
    assert 4 < together(16) < 16


def test_not_all_of_too_many_endings_are_offered() -> None:
    offers = ReturnOffers(thread := cast(Any, ScriptedThread()), BLOCK_SIZE)
    offers.stepped(BatchPlan(), 1.0)
    most = int(MAX_AHEAD_S * RETURNS_PER_S)
    for _ in range(3 * most):
        ended = streaming(8)
        offers.ended(ended)
    offered = len(thread.offered)
    assert offered in (most, most + 1), "the time of an offer may be rounded down"
    offers.stepped(BatchPlan(), 2.0)
    offers.ended(ended)
    assert len(thread.offered) == offered + 1


def test_the_offers_of_many_streams_leave_those_of_endings_alone() -> None:
    offers = ReturnOffers(thread := cast(Any, ScriptedThread()), BLOCK_SIZE)
    streams = [streaming(4) for _ in range(40)]
    plan = BatchPlan([Work(stream, 1) for stream in streams])
    offers.stepped(plan, 1.0)
    for stream in streams:
        stream.num_computed_tokens = 8
    for stream in streams[:5]:
        offers.ended(stream)
    assert len(thread.offered) == len(streams) + 5
    # Both together are no more than a node makes.
    at = 1.0 + (together(len(streams)) + 5) / RETURNS_PER_S
    offers.stepped(plan, at - 0.01)
    assert len(thread.offered) == len(streams) + 5
    offers.stepped(plan, at + 0.01)
    assert len(thread.offered) == 2 * len(streams)


def test_what_the_prefill_node_has_computed_is_not_offered() -> None:
    bench = Bench()
    request = bench.request(prompt=10, targets=1)
    bench.step()
    (order,) = bench.thread.fetched
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(50),), 0), FetchLanded(order.transfer_id, 0.1, 1))
    bench.step()
    assert bench.thread.offered == []
    bench.step()
    bench.scheduler.abort(request)
    assert bench.thread.offered == [(order.target, hashes(request.token_ids)[:3])]


def test_nothing_is_offered_without_a_prefill_node_or_an_answer() -> None:
    bench = Decoding()
    change_terms(bench.begin(), prefill=())
    unanswered = bench.begin(prompt=30)
    bench.turn(2)
    assert unanswered.num_generated_tokens == 0
    bench.turn(20)
    assert all(len(names) >= 30 // BLOCK_SIZE for _, names in bench.thread.offered)


def test_a_childs_blocks_are_offered_to_its_parents_node() -> None:
    bench = Decoding()
    request = bench.begin()
    child = request.add_child(5, 2, [9])
    bench.scheduler._by_local_id[2] = child
    bench.turn(8)
    bench.scheduler.abort(child)
    assert (PREFILL, hashes(child.token_ids)[: len(child.block_hashes)]) in bench.thread.offered


# ---------------------------------------------------------------- fetching what is offered


class Returning(Bench):
    """A prefill node that gets offers."""

    def offer(self, *offers: tuple[bytes, ...]) -> list[CachedFetchOrder]:
        """Returns the orders for what was offered."""
        before = len(self.thread.asked)
        self.report(*(BlocksOffered(DECODE, names) for names in offers))
        return self.thread.asked[before:]

    def land(self, order: CachedFetchOrder, count: int | None = None) -> None:
        landed = len(order.hashes) if count is None else count
        self.report(FetchLanded(order.transfer_id, 0.1, 1, landed=landed))

    def has(self, names: tuple[bytes, ...]) -> int:
        """Returns how many of these blocks can be found."""
        return len(self.blocks.match(names, len(names), Match()))


TEXT = hashes([3] * 8)
MOST = NUM_BLOCKS // POOL_SHARE


@pytest.mark.parametrize("landed", [0, 1, 2])
def test_offered_blocks_rest_in_the_prefix_cache(landed: int) -> None:
    bench = Returning()
    (order,) = bench.offer(TEXT)
    assert (order.target, order.hashes) == (DECODE, TEXT)
    assert bench.blocks.num_free == NUM_BLOCKS - 2
    bench.land(order, landed)
    assert bench.has(TEXT) == landed
    assert bench.all_free
    assert bench.connector.returns().blocks_returned == landed
    assert len(bench.thread.asked) == 1


def test_only_what_is_missing_is_fetched() -> None:
    bench = Returning()
    held = hold(bench, [3] * 4)
    (order,) = bench.offer(TEXT)
    assert order.hashes == TEXT[1:]
    # What is here already is not evicted meanwhile: without it, the rest would be useless.
    assert bench.blocks.num_holders(held[0]) == 1
    bench.land(order)
    assert bench.has(TEXT) == 2
    assert bench.offer(TEXT) == []


def test_a_long_text_comes_in_several_fetches() -> None:
    bench = Returning()
    names = hashes([3] * 20)
    orders = bench.offer(names)
    while orders[-1].hashes[-1] != names[-1]:
        assert len(orders[-1].hashes) <= MOST
        bench.land(orders[-1])
        orders.append(bench.thread.asked[-1])
    bench.land(orders[-1])
    assert (bench.has(names), len(bench.thread.asked)) == (5, 3)
    assert bench.all_free


def test_the_offers_of_one_text_wait_for_its_fetch() -> None:
    bench = Returning()
    (order,) = bench.offer(TEXT[:1])
    assert bench.offer(TEXT[:1], TEXT, hashes([3] * 12)) == []
    bench.land(order)
    assert bench.thread.asked[-1].hashes == hashes([3] * 12)[1:3]
    assert len(bench.thread.asked) == 2


def test_texts_that_begin_alike_are_both_fetched() -> None:
    bench = Returning()
    texts = [hashes([3] * 4 + [token] * 4) for token in (5, 6)]
    (order,) = bench.offer(*texts)
    assert order.hashes == texts[0]
    bench.land(order)
    assert bench.thread.asked[-1].hashes == texts[1][1:]
    bench.land(bench.thread.asked[-1])
    assert [bench.has(text) for text in texts] == [2, 2]
    assert bench.all_free


def test_several_texts_of_one_engine_come_in_one_fetch() -> None:
    bench = Returning()
    texts = [hashes([token] * 4) for token in range(10, 10 + MOST)]
    (order,) = bench.offer(*texts)
    assert order.hashes == tuple(name for text in texts for name in text)
    assert len(set(order.block_ids)) == MOST
    bench.land(order)
    assert [bench.has(text) for text in texts] == [1] * MOST
    assert bench.connector.returns().blocks_returned == MOST
    assert len(bench.thread.asked) == 1
    assert bench.all_free


def test_the_texts_of_two_engines_come_in_two_fetches() -> None:
    bench = Returning()
    texts = [hashes([token] * 4) for token in (10, 11)]
    bench.report(BlocksOffered(DECODE, texts[0]), BlocksOffered(PREFILL, texts[1]))
    assert [(order.target, order.hashes) for order in bench.thread.asked] == [(DECODE, texts[0]), (PREFILL, texts[1])]


def test_so_many_texts_come_in_one_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_return, "MAX_TEXTS", 1)
    bench = Returning()
    (order,) = bench.offer(*[hashes([token] * 4) for token in (10, 11)])
    assert len(order.hashes) == 1
    bench.report()
    assert len(bench.thread.asked) == 2


def test_a_text_that_the_engine_has_no_more_costs_those_behind_it_nothing() -> None:
    """A fetch ends with the first block that is not there. What is behind that is asked for in the next one."""
    bench = Returning()
    texts = [hashes([token] * 4) for token in range(10, 10 + MOST)]
    (order,) = bench.offer(*texts)
    bench.land(order, 0)
    again = bench.thread.asked[-1]
    assert again.hashes == order.hashes[1:]
    bench.land(again)
    assert [bench.has(text) for text in texts] == [0, *[1] * (MOST - 1)]
    assert len(bench.thread.asked) == 2
    assert bench.all_free


def test_a_failed_fetch_of_several_texts_is_not_repeated() -> None:
    bench = Returning()
    (order,) = bench.offer(*[hashes([token] * 4) for token in range(10, 10 + MOST)])
    bench.report(FetchFailed(order.transfer_id, "gone", 1, (), FailureKind.PEER_LOST))
    assert bench.has(order.hashes[:1]) == 1
    assert len(bench.thread.asked) == 1
    assert bench.all_free


def test_few_fetches_run_at_a_time() -> None:
    bench = Returning()
    texts = [hashes([token] * 4) for token in range(10, 10 + MAX_FETCHES + 1)]
    first = bench.offer(*texts)
    assert sum(len(order.hashes) for order in first) == min(MAX_FETCHES, MOST)
    for order in first:
        bench.land(order)
    assert len(bench.thread.asked) > len(first)


def test_offers_that_are_too_many_are_dropped() -> None:
    bench = Returning()
    texts = [hashes([token] * 4) for token in range(10, 20 + MAX_WAITING)]
    bench.offer(*texts)
    assert bench.connector.returns().offers_dropped >= 10


@pytest.mark.parametrize("landed", [0, 1])
def test_a_failed_fetch_keeps_what_has_landed(landed: int) -> None:
    bench = Returning()
    (order,) = bench.offer(TEXT)
    late = order.block_ids[1:]
    bench.report(FetchFailed(order.transfer_id, "gone", landed, late, FailureKind.PEER_LOST))
    assert bench.has(TEXT) == landed
    assert bench.blocks.num_quarantined == 1
    bench.report(BlocksReleased(late))
    assert bench.all_free
    assert len(bench.thread.asked) == 1


def test_blocks_that_live_requests_need_are_not_taken() -> None:
    bench = Returning()
    table: list[int] = []
    request = bench.request(prompt=10, targets=0)
    bench.step()
    assert bench.blocks.grow(table, (bench.blocks.num_free - 1) * BLOCK_SIZE)
    assert bench.offer(TEXT) == []
    assert bench.connector.returns().offers_dropped == 1
    bench.blocks.free(table)
    bench.scheduler.abort(request)
    assert bench.all_free


def test_no_block_is_taken_that_is_still_to_be_copied() -> None:
    bench = Returning()
    request = bench.request(prompt=6, targets=0)
    child = request.add_child(5, 2)
    bench.scheduler._by_local_id[2] = child
    bench.step()
    source = request.block_table[1]
    bench.scheduler.abort(request)
    assert bench.blocks.num_holders(source) == 1, "the copy holds it"
    (order,) = bench.offer(TEXT)
    assert not {source, *child.block_table} & set(order.block_ids)
    assert bench.step().copies == {child.block_table[1]: source}
    assert bench.blocks.num_holders(source) == 0


def test_fetches_make_way_for_live_requests() -> None:
    bench = Returning()
    table: list[int] = []
    (order,) = bench.offer(TEXT)
    assert bench.blocks.grow(table, (bench.blocks.num_free - 1) * BLOCK_SIZE)
    request = bench.request(prompt=10, targets=0)
    assert bench.step().work == []
    bench.report()
    bench.report()
    assert bench.thread.cancelled == [order.transfer_id]
    bench.report(FetchCancelled(order.transfer_id, ()))
    assert bench.step().work[0].request is request
    bench.scheduler.abort(request)
    bench.blocks.free(table)
    assert bench.all_free


def test_returned_blocks_take_the_places_of_those_that_rested_longest() -> None:
    bench = Returning()
    old, new = [5] * 12, [6] * 4 * (NUM_BLOCKS - 3)
    hold(bench, old)
    hold(bench, new)
    (order,) = bench.offer(TEXT)
    bench.land(order)
    assert bench.has(TEXT) == 2
    assert bench.has(hashes(old)) == 1
    assert bench.has(hashes(new)) == NUM_BLOCKS - 3
