"""Tests that a prompt which cannot be transferred has no effect on the placement of others."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import Disaggregation, SchedulerConfig
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.placement.placement_rule import PlacementDecision, PromptSize
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.scheduling.output_collector import OutputCollector
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.wire.engine import PrefillReason, PrefillSource
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import PrefillLoad
from pdserve_kvtransfer.events import FailureKind, FetchEvent, FetchFailed, LoadHeard, PrefillNodeMet
from tests.engine.kv_connector.test_connectors import ScriptedThread
from tests.engine.placements import make_placement
from tests.terms import made_terms

BLOCK_SIZE, BOOT = 4, new_id()
TARGET = PrefillTarget("p0", "tcp://127.0.0.1:1", new_id())
OTHERS = PromptSize(missing_tokens=256, cached_tokens=0, queued_tokens=0, streams=4)
"""A prompt that belongs on a prefill node, because this node has streams."""
TIMEOUT_S = 30.0


class Node:
    """A decode node that has measured itself and its prefill node, by a clock that a test sets."""

    def __init__(self, mode: Disaggregation = Disaggregation.AUTO) -> None:
        step_cost = StepCost()
        step_cost.observe(0, 0, 256, 0.128, now=0.0)
        self.now = 1.0
        self.placement = make_placement(BLOCK_SIZE, mode, step_cost)
        self.placement.ordered(TARGET, "first", 256, 0, 0.0).answered("first", 0, PrefillLoad(0, 4000.0), 0.1)
        self.thread = ScriptedThread()
        thread: Any = self.thread
        blocks = BlockManager(1024, BLOCK_SIZE)
        self.connector = PromptFetcher(blocks, thread, TIMEOUT_S, BOOT, self.placement)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256)
        stop = StopRule(frozenset({2}), 4096)
        self.scheduler = Scheduler(blocks, config, stop, OutputCollector(), self.connector.release, self.placement)

    def add(self, tokens: int = 256, deadline_s: float = 600.0) -> Request:
        request = Request(
            uuid=new_id(),
            token_ids=[7] * tokens,
            num_prompt_tokens=tokens,
            sampling=SamplingParams(max_tokens=5, seed=1),
            arrived=self.now,
            terms=made_terms(deadline_s, prefill=(TARGET,)),
            local_id=len(self.thread.fetched),
        )
        self.scheduler.add(request)
        self.connector.start(self.scheduler.schedule(self.now), self.now)
        return request

    def hears(self, *events: FetchEvent) -> None:
        for event in events:
            self.connector.on_event(self.scheduler, event, self.now)

    def fails(self, kind: FailureKind, after_s: float = 0.01, deadline_s: float = 600.0) -> None:
        """Orders the next prompt from the prefill node and lets the fetch fail."""
        self.add(deadline_s=deadline_s)
        self.now += after_s
        self.hears(FetchFailed(self.thread.fetched[-1].transfer_id, "no", 0, (), kind))

    @property
    def decision(self) -> PlacementDecision:
        return self.placement.decide(OTHERS, TARGET, self.now)


REMOTE = PlacementDecision(PrefillSource.REMOTE, PrefillReason.TARGET)
FAILED = PlacementDecision(PrefillSource.LOCAL, PrefillReason.FAILED)
UNFIT = PlacementDecision(PrefillSource.LOCAL, PrefillReason.UNFIT)


@pytest.mark.parametrize(
    ("kind", "decision"),
    [
        (FailureKind.REFUSED, REMOTE),
        (FailureKind.OVERLOADED, REMOTE),
        (FailureKind.CLOSED, REMOTE),
        (FailureKind.FAILED, FAILED),
        (FailureKind.PEER_LOST, FAILED),
        (FailureKind.LEASE_EXPIRED, FAILED),
        (FailureKind.MISFIT, FAILED),
        (FailureKind.CORRUPT, FAILED),
        (FailureKind.STALLED, FAILED),
    ],
)
def test_only_what_a_failure_says_of_the_node_counts_against_it(kind: FailureKind, decision: PlacementDecision) -> None:
    node = Node()
    node.fails(kind)
    assert node.decision == decision


@pytest.mark.parametrize(
    ("after_s", "deadline_s", "decision"), [(TIMEOUT_S, 600.0, FAILED), (0.02, 600.0, REMOTE), (5.0, 5.0, REMOTE)]
)
def test_a_deadline_counts_if_the_prompt_should_have_been_quick(
    after_s: float, deadline_s: float, decision: PlacementDecision
) -> None:
    """It does not count if the time was too short for any node, or if the client's own time ran out."""
    node = Node()
    node.fails(FailureKind.DEADLINE, after_s, deadline_s)
    assert node.decision == decision


def test_overloaded_is_load() -> None:
    node = Node()
    assert node.decision == REMOTE
    node.add()
    (order,) = node.thread.fetched
    node.hears(
        LoadHeard(TARGET.boot_id, PrefillLoad(40_000, 4000.0)),
        FetchFailed(order.transfer_id, "overloaded", 0, (), FailureKind.OVERLOADED),
    )
    assert node.decision == PlacementDecision(PrefillSource.LOCAL, PrefillReason.SOONER)
    node.now += 11.0
    assert node.decision.remote


@pytest.mark.parametrize("mode", [Disaggregation.AUTO, Disaggregation.ALWAYS])
def test_a_prompt_that_the_node_cannot_take_is_not_ordered_there(mode: Disaggregation) -> None:
    node = Node(mode)
    node.hears(PrefillNodeMet(TARGET.boot_id, 1000))
    assert node.placement.decide(PromptSize(900, 100, 0, 4), TARGET, node.now).remote
    assert node.placement.decide(PromptSize(901, 100, 0, 4), TARGET, node.now) == UNFIT
    node.add(1500)
    assert node.thread.fetched == []
    node.hears(PrefillNodeMet(new_id(), 10))
    assert node.decision.remote, "another node's limit"


def test_the_time_that_a_prompt_gets_grows_with_it_and_with_the_queue_before_it() -> None:
    def deadline_s(tokens: int, load: PrefillLoad | None = None, client_s: float = 600.0) -> float:
        node = Node(Disaggregation.ALWAYS)
        if load is not None:
            node.hears(LoadHeard(TARGET.boot_id, load))
        node.add(tokens, client_s)
        return node.thread.fetched[-1].deadline_s

    short, long = deadline_s(40), deadline_s(4000)
    assert short == pytest.approx(TIMEOUT_S, abs=0.1)
    assert long - short == pytest.approx(3960 / 4000, rel=0.2), "by the measured rate"
    assert deadline_s(4000, PrefillLoad(0, 40.0)) == pytest.approx(TIMEOUT_S + 100, rel=0.05)
    assert deadline_s(40, PrefillLoad(8000, 4000.0)) == pytest.approx(short + 2, rel=0.05)
    assert deadline_s(4000, PrefillLoad(10**9, 1e-9)) == 600.0, "the client's own time is a bound"
    assert deadline_s(40, client_s=5.0) == 5.0


def test_a_prefill_node_of_which_nothing_is_known_gets_time_as_if_it_were_like_this_one() -> None:
    node = Node(Disaggregation.ALWAYS)
    stranger = PrefillTarget("p1", "tcp://127.0.0.1:2", new_id())
    assert node.placement.needed_s(stranger, 4000, 0, node.now) == pytest.approx(4000 / 2000, rel=0.1)


def test_a_node_that_is_late_gets_no_more_time_for_it() -> None:
    node = Node()
    before = node.placement.needed_s(TARGET, 4000, 0, node.now)
    node.placement.ordered(TARGET, "stuck", 1, 0, node.now)
    assert node.placement.needed_s(TARGET, 4000, 0, node.now + 500) == pytest.approx(before, rel=0.01)
