"""Tests what may touch a request's blocks: the connectors with a scripted transfer thread, in every order of events."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve.config import (
    CacheConfig,
    CpuConfig,
    EngineConfig,
    KvOverlap,
    LogConfig,
    ModelConfig,
    SchedulerConfig,
    TransferConfig,
)
from pdserve.control.frame import Secrets
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector import open_connector
from pdserve.engine.kv_connector.connector import NoTransferConnector, TransferConnector
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.kv_connector.prompt_pusher import PromptPusher, PushSchedule
from pdserve.engine.kv_connector.transfers import BlockOrder
from pdserve.engine.placement.latency_targets import NONE_YET
from pdserve.engine.placement.placement_rule import PlacementDecision, PromptSize
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.output_collector import OutputCollector
from pdserve.engine.scheduling.request_limits import PromptRule, StopRule
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.liveness import LifeBoard, loop_names, transfer_loop
from pdserve.settings import cache_folder
from pdserve.wire.cache_groups import GroupBlocks
from pdserve.wire.discovery import Role
from pdserve.wire.engine import FinishReason, PrefillSource
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget, PromptTerms
from pdserve.wire.transfer import UNKNOWN_LOAD, EngineSpec, FailureCause, PrefillLoad
from pdserve.wire.version import PROTOCOL_VERSION
from pdserve_kvtransfer.events import (
    BlocksReleased,
    CachedFetchOrder,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
    TransferEvent,
    TransferStats,
    TransferThreadDied,
)
from pdserve_kvtransfer.transport import StepUnderWay
from tests.engine.placements import make_placement
from tests.engine.whole_connector import whole_connector
from tests.eventually import eventually
from tests.terms import change_terms, made_terms

BLOCK_SIZE = 4
VOCAB = 1_000
TIMEOUT_S = 30.0
NUM_BLOCKS = 16
BOOT = new_id()


class ScriptedThread:
    """Stands in for TransferThread: it records its commands and reports the events that a test gives it."""

    def __init__(self) -> None:
        self.fetched: list[FetchOrder] = []
        self.asked: list[CachedFetchOrder] = []
        self.held_counts: list[int] = []
        self.usable: list[int] = []
        self.writes_finished = False
        """Whether the engine has waited for its kernels since the last fetch or push."""
        self.offered: list[tuple[PrefillTarget, tuple[bytes, ...]]] = []
        self.cancelled: list[TransferId] = []
        self.accepted: list[tuple[TransferId, tuple[int, ...]]] = []
        self.pushed: list[tuple[int, tuple[int, ...]]] = []
        self._sent_of: dict[TransferId, list[int]] = {}
        self.first_tokens: list[int] = []
        self.cached_tokens: list[int] = []
        self.loads: list[PrefillLoad] = []
        self.told = UNKNOWN_LOAD
        self.failed: list[str] = []
        self.causes: list[FailureCause] = []
        self.pending: list[TransferEvent] = []

    def fetch(self, order: FetchOrder | CachedFetchOrder) -> None:
        if isinstance(order, FetchOrder):
            self.fetched.append(order)
        else:
            self.asked.append(order)

    def offer(self, target: PrefillTarget, hashes: tuple[bytes, ...], request_id: str) -> None:
        self.offered.append((target, hashes))

    def finish_writes(self) -> None:
        self.writes_finished = True

    def held(self, transfer_id: TransferId, count: int, usable: int = 0) -> None:
        self.held_counts.append(count)
        self.usable.append(usable)

    def accept_blocks(self, transfer_id: TransferId, block_ids: tuple[int, ...]) -> None:
        self.accepted.append((transfer_id, block_ids))

    def cancel_fetch(self, transfer_id: TransferId) -> None:
        self.cancelled.append(transfer_id)

    def push(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None:
        self.pushed.append((first_block, block_ids))
        self._sent_of.setdefault(transfer_id, []).extend(block_ids)

    def pushed_of(self, transfer_id: TransferId) -> list[int]:
        """Returns the blocks that were pushed, in order."""
        return self._sent_of.get(transfer_id, [])

    def accepted_of(self, transfer_id: TransferId) -> int:
        """Returns how many blocks of a transfer may land."""
        ordered = sum(len(order.block_ids) for order in self.fetched if order.transfer_id == transfer_id)
        return ordered + sum(len(blocks) for accepted, blocks in self.accepted if accepted == transfer_id)

    def first_token(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad,
        prompt_logprobs: PromptLogprobs | None,
    ) -> None:
        self.first_tokens += [token.token_id for token in tokens]
        self.cached_tokens.append(cached_tokens)
        self.loads.append(load)

    def tell_load(self, load: PrefillLoad) -> None:
        self.told = load

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause) -> None:
        self.failed.append(reason)
        self.causes.append(cause)

    def events(self) -> list[TransferEvent]:
        pending, self.pending = self.pending, []
        return pending

    def stats(self) -> TransferStats:
        return TransferStats()


class ReachingThread(ScriptedThread):
    """Transfers that reach the cache itself, so that no kernel may be about to write what they touch."""

    def fetch(self, order: FetchOrder | CachedFetchOrder) -> None:
        self._after_writes()
        super().fetch(order)

    def push(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None:
        self._after_writes()
        super().push(transfer_id, first_block, block_ids)

    def _after_writes(self) -> None:
        assert self.writes_finished, "a transfer may touch a block before the kernels that were to write it have ended"
        self.writes_finished = False


def too_long(token_ids: list[int], sampling: SamplingParams) -> str | None:
    return "too long" if len(token_ids) > 40 else None


class Bench:
    """One connector with its scheduler and blocks."""

    def __init__(
        self, overlap: KvOverlap = KvOverlap.ON, *, prefix_cache: bool = True, groups: Sequence[GroupBlocks] = ()
    ) -> None:
        """``groups`` are the cache groups of the model, if it has some."""
        self.thread: ScriptedThread = ReachingThread()
        thread: Any = self.thread
        block_bytes = groups[0].block_bytes if groups else 0
        self.blocks = BlockManager(
            NUM_BLOCKS, BLOCK_SIZE, prefix_cache=prefix_cache, bounded=groups[1:], block_bytes=block_bytes
        )
        order = BlockOrder(BLOCK_SIZE, [group.spec for group in groups])
        self.step_cost = StepCost()
        self.placement = make_placement(BLOCK_SIZE, step_cost=self.step_cost)
        finish = self.thread.finish_writes
        fetching = PromptFetcher(self.blocks, thread, TIMEOUT_S, BOOT, self.placement, VOCAB, finish, order)
        pushing = PromptPusher(self.blocks, thread, too_long, 3, PushSchedule(overlap), self.placement, finish, order)
        self.under_way = StepUnderWay()
        self.connector = whole_connector(thread, self.blocks, fetching, pushing, BOOT, finish, order, self.under_way)
        self.collector = OutputCollector()
        self.scheduler = Scheduler(
            self.blocks,
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8),
            StopRule(frozenset({2}), 60),
            self.collector,
            self.connector.release,
            self.placement,
        )

    def request(self, prompt: int = 10, targets: int = 1, max_tokens: int = 5) -> Request:
        made = Request(
            uuid=new_id(),
            token_ids=[7] * prompt,
            num_prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=1),
            arrived=0.0,
            terms=made_terms(
                50.0, prefill=tuple(PrefillTarget(f"p{i}", "tcp://127.0.0.1:1", new_id()) for i in range(targets))
            ),
            local_id=1,
        )
        self.scheduler.add(made)
        return made

    def step(self) -> BatchPlan:
        plan = self.scheduler.schedule(1.0)
        self.connector.start(plan, 1.0)
        assert self.under_way.decodes == any(work.num_tokens == 1 for work in plan.work)
        self.scheduler.postprocess(plan, [SampledToken(50) for _ in plan.sampled_requests], 1.0)
        self.connector.stepped(self.scheduler, plan, 1.0)
        assert not self.under_way.decodes
        return plan

    def report(self, *events: TransferEvent) -> None:
        self.thread.pending += events
        self.connector.poll(self.scheduler, 2.0)

    def tokens(self) -> list[int]:
        step = self.collector.take()
        return [token for output in step.outputs for token in output.new_token_ids] if step else []

    @property
    def all_free(self) -> bool:
        free = all(pool.num_free == len(pool.ids) for pool in self.blocks.pools)
        return free and not list(self.scheduler.live())


def fetching(targets: int = 1) -> tuple[Bench, Request, FetchOrder]:
    bench = Bench()
    request = bench.request(targets=targets)
    bench.step()
    (order,) = bench.thread.fetched
    return bench, request, order


def test_a_fetch_asks_for_every_block_of_the_prompt() -> None:
    _, request, order = fetching()
    assert order.token_ids == [7] * 10
    assert order.first_block == 0
    assert order.block_ids == tuple(request.block_table)
    assert len(order.block_ids) == 3
    assert 30 <= order.deadline_s < 31


def test_the_prefill_node_is_told_the_priority() -> None:
    bench = Bench()
    change_terms(bench.request(), priority=-3)
    bench.step()
    assert [order.terms.priority for order in bench.thread.fetched] == [-3]


def test_the_first_token_is_passed_on_before_the_blocks_land() -> None:
    bench, request, order = fetching()
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(33),), 0))
    assert bench.tokens() == [33]
    assert bench.scheduler.num_remote == 1
    bench.report(FetchLanded(order.transfer_id, 0.1, 100, 0.02))
    assert request.facts.transfer_seconds == 0.02
    assert request.status is Status.RUNNING
    assert bench.step().work[0].num_tokens == 1
    assert request.facts.prefill_source is PrefillSource.REMOTE


@pytest.mark.parametrize("token_id", [VOCAB, -1, 2**40])
def test_a_first_token_that_the_model_lacks_is_not_taken(token_id: int) -> None:
    bench, request, order = fetching()
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(token_id),), 0))
    assert bench.tokens() == []
    bench.report(FetchLanded(order.transfer_id, 0.1, 100, 0.02))
    assert request.facts.prefill_source is PrefillSource.FALLBACK
    assert bench.step().work[0].request is request


def test_a_first_token_that_ends_the_answer_cancels_the_fetch() -> None:
    bench, _, order = fetching()
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(2),), 0))
    assert bench.thread.cancelled == [order.transfer_id]
    assert not bench.all_free
    bench.report(FetchCancelled(order.transfer_id, order.block_ids[1:2]))
    assert bench.blocks.num_quarantined == 1
    bench.report(BlocksReleased(order.block_ids[1:2]))
    assert bench.all_free


@pytest.mark.parametrize("end", ["cancelled", "failed", "landed"])
def test_an_aborted_fetch_keeps_its_blocks_until_its_end_is_reported(end: str) -> None:
    bench, request, order = fetching()
    bench.scheduler.abort(request)
    assert bench.blocks.num_free == NUM_BLOCKS - 3
    events: dict[str, TransferEvent] = {
        "cancelled": FetchCancelled(order.transfer_id, ()),
        "failed": FetchFailed(order.transfer_id, "lost", 1, ()),
        "landed": FetchLanded(order.transfer_id, 0.1, 1),
    }
    bench.report(events[end])
    assert bench.all_free


def test_a_failed_fetch_goes_to_the_next_prefill_node_for_what_is_missing() -> None:
    bench, request, order = fetching(targets=2)
    bench.report(FetchFailed(order.transfer_id, "lost", 1, ()))
    bench.step()
    again = bench.thread.fetched[1]
    assert again.transfer_id.attempt == 1
    assert again.target.name == "p1"
    assert again.first_block == 1
    assert again.block_ids == order.block_ids[1:]
    assert request.status is Status.WAITING_FOR_REMOTE_KVS


@pytest.mark.parametrize("asked", [True, False])
def test_a_prompt_that_its_prefill_node_may_have_died_of_goes_back_to_the_proxy(asked: bool) -> None:
    """If the node was gone before it was asked, the next one is tried."""
    bench, request, order = fetching(targets=2)
    change_terms(request, gives_back=True)
    bench.report(FetchFailed(order.transfer_id, "lost", 1, (order.block_ids[1],), asked=asked))
    bench.step()
    assert request.ended is asked
    assert len(bench.thread.fetched) == (1 if asked else 2)
    if asked:
        (output,) = bench.collector.take().outputs  # type: ignore[union-attr]
        assert (output.finish, output.error) == (FinishReason.PREFILL_LOST, "p0")
        assert bench.blocks.num_quarantined == 1
        bench.report(BlocksReleased((order.block_ids[1],)))
        assert bench.all_free


def test_the_log_says_of_which_request_a_fetch_failed_and_why(caplog: pytest.LogCaptureFixture) -> None:
    bench, request, order = fetching(targets=2)
    change_terms(request, request_id="chat-1")
    with caplog.at_level(logging.INFO, logger="pdserve.engine.kv_connector"):
        bench.report(FetchFailed(order.transfer_id, "it fell silent", 1, (), FailureKind.LEASE_EXPIRED))
    (line,) = caplog.messages
    uuid = request.uuid.hex()[:12]
    assert line.startswith(f"request_id=chat-1 uuid={uuid} transfer={uuid}/0 prefill=p0 ")
    assert "lease_expired" in line
    assert "it fell silent" in line


def test_no_prefill_node_is_asked_for_one_block_or_less() -> None:
    bench, request, order = fetching(targets=2)
    bench.report(FetchFailed(order.transfer_id, "lost", 2, ()))
    assert [(work.request, work.num_tokens) for work in bench.step().work] == [(request, 2)]
    assert len(bench.thread.fetched) == 1


def test_only_blocks_that_the_prefix_cache_lacks_are_asked_for() -> None:
    bench, _, order = fetching()
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(2),), 0))
    bench.report(FetchCancelled(order.transfer_id, ()))
    assert bench.blocks.num_cached == 0, "nothing of it is known to have landed"
    again = bench.request()
    bench.step()
    order = bench.thread.fetched[-1]
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(33),), 0), FetchLanded(order.transfer_id, 0.1, 1))
    assert bench.blocks.num_cached == 2
    longer = bench.request(prompt=20)
    bench.step()
    order = bench.thread.fetched[-1]
    assert (order.first_block, len(order.block_ids)) == (2, 3)
    assert longer.block_table[:2] == again.block_table[:2]
    assert order.block_ids == tuple(longer.block_table[2:])
    assert len(order.token_ids) == 20
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(33),), 8), FetchLanded(order.transfer_id, 0.1, 1))
    assert longer.facts.cached_tokens == 8
    same = bench.request(prompt=20)
    assert bench.step().fetches == []
    assert same.num_computed_tokens == 20


def test_blocks_that_others_read_are_not_quarantined() -> None:
    bench, request, order = fetching()
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(33),), 0), FetchLanded(order.transfer_id, 0.1, 1))
    with pytest.raises(EngineError, match="others may read it"):
        bench.blocks.quarantine(request.block_table[:1])


def test_after_the_last_prefill_node_the_rest_is_computed_here() -> None:
    bench, request, order = fetching()
    bench.report(FetchFailed(order.transfer_id, "lost", 2, ()))
    assert bench.scheduler.counters.prefills_failed == {"peer_lost": 1}
    plan = bench.step()
    assert [(work.request, work.num_tokens) for work in plan.work] == [(request, 2)]
    assert bench.tokens() == [50]
    assert request.facts.prefill_source is PrefillSource.FALLBACK


def test_quarantined_blocks_are_replaced_before_computing_here() -> None:
    bench, request, order = fetching()
    bad = order.block_ids[2]
    bench.report(FetchFailed(order.transfer_id, "lost", 2, (bad,)))
    bench.step()
    assert bad not in request.block_table
    assert request.block_table[:2] == list(order.block_ids[:2])
    bench.scheduler.abort(request)
    bench.report(BlocksReleased((bad,)))
    assert bench.all_free


def test_a_token_that_the_client_has_is_not_repeated_by_the_second_node() -> None:
    bench, request, order = fetching(targets=2)
    bench.report(
        FirstTokenArrived(order.transfer_id, (SampledToken(33),), 0), FetchFailed(order.transfer_id, "lost", 1, ())
    )
    bench.step()
    assert bench.tokens()[0] == 33
    assert request.token_ids[10] == 33


def test_a_dead_transfer_thread_ends_the_engine() -> None:
    with pytest.raises(EngineError, match="oops"):
        Bench().report(TransferThreadDied("oops"))


def wanted(prompt: int = 10, first_block: int = 0) -> PushWanted:
    return PushWanted(
        TransferId(new_id(), 0, BOOT), [7] * prompt, first_block, SamplingParams(max_tokens=5, seed=1), 30.0
    )


def test_blocks_are_pushed_as_chunks_fill_them_and_the_last_one_partial() -> None:
    bench, order = Bench(), wanted(prompt=14)
    bench.report(order)
    bench.step()
    (request,) = bench.scheduler.live()
    table = tuple(request.block_table)
    assert bench.thread.pushed == [(0, table[:2])]
    bench.step()
    assert bench.thread.pushed == [(0, table[:2]), (2, table[2:4])]
    assert bench.thread.first_tokens == [50]
    assert request.status is Status.PUSHING
    assert bench.scheduler.num_pushing == 1
    assert bench.blocks.num_free == NUM_BLOCKS - 4
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    assert bench.all_free


def test_prompts_of_other_nodes_are_computed_by_their_priorities() -> None:
    bench = Bench()
    orders = [replace(wanted(), terms=PromptTerms(priority=priority)) for priority in (1, 0, -1)]
    bench.report(*orders)
    computed = [work.request.transfer for _ in range(6) for work in bench.step().work]
    assert list(dict.fromkeys(computed)) == [order.transfer_id for order in reversed(orders)]


@pytest.mark.parametrize("overlap", [KvOverlap.OFF, KvOverlap.AUTO])
def test_without_overlap_all_blocks_are_pushed_when_the_prompt_is_computed(overlap: KvOverlap) -> None:
    bench, order = Bench(overlap), wanted(prompt=14, first_block=1)
    bench.report(order)
    bench.step()
    assert bench.thread.pushed == []
    (request,) = bench.scheduler.live()
    table = tuple(request.block_table)
    bench.step()
    assert bench.thread.pushed == [(1, table[1:])]
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    bench.report(wanted(prompt=14))
    bench.step()
    assert [(first, len(blocks)) for first, blocks in bench.thread.pushed[1:]] == [(0, 4)], "cached ones neither"


def test_what_decides_is_how_much_has_to_be_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the prompt does not decide, since the decode node may have most of its blocks already."""
    monkeypatch.setattr("pdserve.engine.kv_connector.prompt_pusher.OVERLAP_FROM_TOKENS", 12)
    bench = Bench(KvOverlap.AUTO)
    bench.report(wanted(prompt=14, first_block=1))
    bench.step()
    assert bench.thread.pushed == [], "ten tokens"
    bench = Bench(KvOverlap.AUTO)
    bench.report(wanted(prompt=14))
    bench.step()
    assert len(bench.thread.pushed) == 1, "fourteen"


def test_the_first_token_says_how_fast_the_node_is_and_what_else_it_has_to_do() -> None:
    bench, order = Bench(), wanted(prompt=8)
    bench.step_cost.observe(0, 0, 256, 0.128, now=1.0)
    bench.report(order, wanted(prompt=14), wanted(prompt=9))
    assert bench.thread.told == PrefillLoad(8 + 14 + 9, 2000.0), "to those who wait, while they wait"
    bench.step()
    assert bench.thread.loads == [PrefillLoad(14 + 9, 2000.0)]
    bench.report()
    assert bench.thread.told == PrefillLoad(14 + 9, 2000.0)


def test_a_node_says_that_its_own_streams_make_prompts_slower() -> None:
    bench = Bench()
    bench.step_cost.observe(0, 0, 256, 0.128)
    bench.step_cost.observe(1, 10, 0, 0.1)
    bench.request(targets=0, max_tokens=40)
    for _ in range(2):
        bench.step()
    bench.report(wanted())
    assert bench.thread.told.tokens_per_s == pytest.approx(256 / (0.128 + 0.1), rel=0.05)


def test_the_placement_is_asked_with_what_is_cached_queued_and_running(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, asked = Bench(), []
    decide = bench.placement.decide

    def spy(prompt: PromptSize, target: PrefillTarget, now: float) -> PlacementDecision:
        asked.append(prompt)
        return decide(prompt, target, now)

    monkeypatch.setattr(bench.placement, "decide", spy)
    bench.request(prompt=14, targets=0)
    bench.step()
    bench.request(prompt=16)
    bench.step()
    # The first prompt has two computed blocks, with which the second one begins, and six tokens left to compute.
    first = PromptSize(8, 8, 6, streams=1, own_itl=NONE_YET, waited_s=1.0, may_wait=True)
    assert asked == [first]


def test_what_becomes_of_an_order_is_learnt() -> None:
    bench, request, order = fetching(targets=2)
    (node,) = bench.placement.stats(1.0).nodes
    assert (node.name, node.queued_tokens, node.tokens_per_s) == ("p0", 10, 0.0)
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(33),), 0, PrefillLoad(100, 2000.0)))
    (node,) = bench.placement.stats(2.0).nodes
    assert (node.queued_tokens, node.tokens_per_s) == (100, 2000.0)
    bench.report(FetchLanded(order.transfer_id, 0.1, 100, 0.01, 50))
    assert bench.placement.stats(2.0).nodes[0].bytes_per_s == pytest.approx(5000)
    bench.scheduler.abort(request)
    other = bench.request(prompt=20)
    bench.step()
    assert [node.queued_tokens for node in bench.placement.stats(2.0).nodes] == [20 - 2 * BLOCK_SIZE], (
        "of the newest p0"
    )
    bench.scheduler.abort(other)
    assert [node.queued_tokens for node in bench.placement.stats(2.0).nodes] == [0], "withdrawn"


def test_a_node_says_that_its_streams_are_over_though_it_has_no_pushes() -> None:
    """Otherwise other nodes would send it no prompts for a while."""
    bench, order = Bench(), wanted()
    request = bench.request(targets=0, max_tokens=40)
    bench.step()
    bench.report(order)
    for _ in range(3):
        bench.step()
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    assert bench.thread.told.streams == 1
    bench.scheduler.abort(request)
    bench.report()
    assert bench.thread.told == PrefillLoad()


def test_blocks_that_the_decode_node_has_are_not_pushed() -> None:
    bench, order = Bench(), wanted(prompt=14, first_block=3)
    bench.report(order)
    bench.step()
    bench.step()
    assert [first for first, _ in bench.thread.pushed] == [3]


@pytest.mark.parametrize("told", [True, False])
def test_a_prefill_node_logs_one_line_when_a_push_is_over(told: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench, order = Bench(), replace(wanted(), terms=PromptTerms(request_id="chat-1" if told else ""))
    with caplog.at_level(logging.INFO, logger="pdserve.engine.kv_connector"):
        bench.report(order)
        bench.step()
        bench.report(PushCancelled(order.transfer_id))
        bench.report(PushEnded(order.transfer_id, PushOutcome.CANCELLED))
    (line,) = caplog.messages
    assert line.startswith(f"request_id={'chat-1' if told else '-'} uuid=")
    assert line.endswith(" outcome=cancelled")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_push_keeps_its_blocks_until_no_send_reads_them(steps: int) -> None:
    bench, order = Bench(), wanted(prompt=14)
    bench.report(order)
    for _ in range(steps):
        bench.step()
    held = NUM_BLOCKS - bench.blocks.num_free
    bench.report(PushCancelled(order.transfer_id))
    assert not list(bench.scheduler.live())
    assert NUM_BLOCKS - bench.blocks.num_free == held
    bench.report(PushEnded(order.transfer_id, PushOutcome.CANCELLED))
    assert bench.all_free


def test_cached_blocks_are_pushed_before_the_rest_is_computed() -> None:
    bench, order = Bench(), wanted(prompt=14)
    bench.report(order)
    while bench.step().work:
        pass
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    bench.thread.pushed.clear()
    bench.report(wanted(prompt=14, first_block=1))
    plan = bench.scheduler.schedule(1.0)
    bench.connector.start(plan, 1.0)
    (work,) = plan.work
    assert (work.num_tokens, work.request.facts.cached_tokens) == (2, 12)
    table = tuple(work.request.block_table)
    assert bench.thread.pushed == [(1, table[1:3])]
    bench.scheduler.postprocess(plan, [SampledToken(50)], 1.0)
    bench.connector.stepped(bench.scheduler, plan, 1.0)
    assert bench.thread.pushed == [(1, table[1:3]), (3, table[3:])]
    assert bench.thread.cached_tokens == [0, 12]


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    bench, order = Bench(), wanted(prompt=41)
    bench.report(order)
    assert (bench.thread.failed, bench.thread.causes) == (["too long"], [FailureCause.PROMPT])
    bench.report(PushEnded(order.transfer_id, PushOutcome.FAILED))
    assert bench.all_free


def test_a_full_queue_refuses_more() -> None:
    bench = Bench()
    orders = [wanted() for _ in range(4)]
    bench.report(*orders)
    assert bench.scheduler.num_waiting == 3
    assert bench.thread.failed == ["overloaded: 3 prompts are waiting"]
    assert bench.thread.causes == [FailureCause.LOAD]
    assert bench.thread.told.queued_tokens == 30, "which goes with the refusal"


def test_waiting_prompts_survive_while_an_ended_one_still_holds_its_blocks() -> None:
    bench = Bench()
    first, second, third = wanted(prompt=40), wanted(prompt=40), wanted(prompt=40)
    bench.report(first, second, third)
    bench.step()
    bench.report(PushCancelled(first.transfer_id))
    assert bench.step().work == []
    assert bench.scheduler.num_waiting == 2
    bench.report(PushEnded(first.transfer_id, PushOutcome.CANCELLED))
    assert [work.request.transfer for work in bench.step().work] == [second.transfer_id]


def test_a_prefill_node_gives_up_at_the_deadline() -> None:
    bench, order = Bench(), wanted()
    bench.report(order)
    bench.step()
    (request,) = bench.scheduler.expired(1000.0)
    bench.connector.give_up(request, "deadline passed", FailureCause.DEADLINE)
    bench.scheduler.finish(request, FinishReason.DEADLINE)
    assert (bench.thread.failed, bench.thread.causes) == (["deadline passed"], [FailureCause.DEADLINE])
    assert bench.collector.take() is None
    bench.report(PushEnded(order.transfer_id, PushOutcome.FAILED))
    assert bench.all_free


def steps(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.step()


@pytest.mark.parametrize("prompt", [23, 16], ids=["while the order is computed", "while the order is pushed"])
def test_a_request_that_needs_a_block_leaves_those_of_orders_alone(prompt: int) -> None:
    """The order has nine of sixteen blocks. The node's own request waits until they are free again, and goes on."""
    bench = Bench()
    own = bench.request(prompt=prompt, targets=0, max_tokens=20)
    steps(bench, 3)
    order = replace(wanted(), token_ids=[8] * 36)
    bench.report(order)
    steps(bench, 20)
    assert own.status is Status.WAITING
    assert bench.scheduler.counters.preemptions >= 1
    assert len(bench.thread.pushed_of(order.transfer_id)) == 9
    assert len(bench.thread.first_tokens) == 1
    bench.report(PushEnded(order.transfer_id, PushOutcome.DONE))
    steps(bench, 30)
    assert own.num_generated_tokens == 20
    assert bench.all_free


def test_a_node_fetches_and_is_fetched_from_at_once() -> None:
    bench, request, order = fetching()
    bench.report(wanted(prompt=8))
    steps(bench, 2)
    assert len(bench.thread.first_tokens) == 1
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    bench.report(FirstTokenArrived(order.transfer_id, (SampledToken(50),), 0), FetchLanded(order.transfer_id, 0.1, 1))
    bench.step()
    assert request.num_generated_tokens == 2


@pytest.mark.parametrize(
    ("has_peers", "kind"), [(True, TransferConnector), (False, NoTransferConnector)], ids=["peers", "no peers"]
)
@pytest.mark.parametrize("role", Role)
def test_a_node_of_any_role_transfers_if_it_has_peers(role: Role, has_peers: bool, kind: type) -> None:
    config = EngineConfig(
        role=role,
        boot_id=BOOT,
        secret=b"a secret for tests",
        model_dir="",
        cache_dir=str(cache_folder(os.environ)),
        model=ModelConfig(),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(),
        transfer=TransferConfig(),
        cpu=CpuConfig(),
        log=LogConfig(),
        has_peers=has_peers,
    )
    spec = EngineSpec(
        protocol=PROTOCOL_VERSION,
        oldest_protocol=PROTOCOL_VERSION,
        fingerprint="f",
        dtype="fp32",
        block_size=4,
        num_layers=1,
        kv_heads=1,
        head_dim=2,
        tp_size=1,
    )
    blocks, board = BlockManager(2, 4), LifeBoard.create(len(loop_names(1)))
    connector, control = open_connector(
        config,
        spec=spec,
        kv_cache=torch.zeros(2, 1, 1, 2, 4, 2),
        shared=None,
        blocks=blocks,
        prompts=PromptRule(10, 10),
        placement=make_placement(4),
        ranks=None,
        secrets=Secrets(config.secret),
        wake=lambda: None,
        life=board,
    )
    try:
        assert type(connector) is kind
        assert bool(control) == has_peers
        if has_peers:
            # The transfer thread shows itself when it has begun.
            eventually(lambda: board.shown(transfer_loop(0)))
        else:
            assert board.shown(transfer_loop(0)) is None
    finally:
        connector.close()
        board.close()
