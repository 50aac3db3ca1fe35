"""Tests where a decode node places prompts in the situations that placement is made for."""

from __future__ import annotations

from pdserve.config import Disaggregation
from pdserve.engine.placement.placement import STALE_S, Placement, PlacementDecision
from pdserve.engine.placement.prefill_cost import PromptSize
from pdserve.engine.placement.step_cost import StepCost
from pdserve.wire.engine import PrefillReason, PrefillSource
from pdserve.wire.ids import new_id
from pdserve.wire.ticket import PrefillTarget
from pdserve.wire.transfer import PrefillLoad
from tests.engine.placements import make_placement

TARGET = PrefillTarget("p0", "tcp://127.0.0.1:1", new_id())
RATE = 2000.0
ALONE = PromptSize(256, 0, 0, 0)
BESIDE_STREAMS = PromptSize(256, 0, 0, 4)

LOCAL = PlacementDecision(PrefillSource.LOCAL, PrefillReason.CHEAPER)
REMOTE = PlacementDecision(PrefillSource.REMOTE, PrefillReason.CHEAPER)
PROBE = PlacementDecision(PrefillSource.REMOTE, PrefillReason.PROBE)


def measured(
    remote_rate: float = RATE, queued: int = 0, local_rate: float = RATE, remote_streams: int = 0
) -> Placement:
    """Returns a placement for which this node and a prefill node have both computed a prompt at 0 s."""
    step_cost = StepCost()
    step_cost.observe(0, 0, 256, 256 / local_rate, now=0.0)
    placement = make_placement(16, Disaggregation.AUTO, step_cost)
    seconds = 256 / remote_rate
    node = placement.ordered(TARGET, "first", 256, 0, -seconds)
    node.answered("first", 0, PrefillLoad(queued, remote_rate, remote_streams), 0.0)
    return placement


def test_an_unknown_prefill_node_is_tried() -> None:
    assert make_placement(16, Disaggregation.AUTO).decide(ALONE, TARGET, 0.0) == PROBE


def test_alone_on_equal_hardware_nothing_is_moved() -> None:
    assert measured().decide(ALONE, TARGET, 1.0) == LOCAL


def test_streams_are_protected() -> None:
    assert measured().decide(BESIDE_STREAMS, TARGET, 1.0) == REMOTE


def test_of_two_mixed_nodes_only_the_one_with_fewer_streams_computes_for_the_other() -> None:
    assert measured(remote_streams=4).decide(BESIDE_STREAMS, TARGET, 1.0) == LOCAL
    assert measured(remote_streams=3).decide(BESIDE_STREAMS, TARGET, 1.0) == REMOTE


def test_a_node_with_one_stream_does_not_take_prompts_from_a_short_queue() -> None:
    placement = measured()
    placement.ordered(TARGET, "ahead", 256, 0, 1.0)
    assert placement.decide(PromptSize(256, 0, 0, 1), TARGET, 1.0) == REMOTE


def test_a_burst_on_an_idle_pair_goes_to_the_prefill_node_but_for_the_first() -> None:
    placement, went = measured(), []
    for admitted in range(16):
        decision = placement.decide(PromptSize(256, 0, 256 if admitted else 0, admitted), TARGET, 1.0)
        went.append(decision)
        if decision.remote:
            placement.ordered(TARGET, admitted, 256, 0, 1.0)
    assert went == [LOCAL] + [REMOTE] * 15


def test_a_slow_prefill_node_is_left_alone_by_an_idle_decode_node_and_used_where_streams_run() -> None:
    placement = measured(remote_rate=RATE / 4)
    assert placement.decide(ALONE, TARGET, 1.0) == LOCAL
    assert placement.decide(BESIDE_STREAMS, TARGET, 1.0) == REMOTE


def test_a_fast_prefill_node_is_used_by_an_idle_decode_node() -> None:
    assert measured(remote_rate=4 * RATE).decide(ALONE, TARGET, 1.0) == REMOTE


def test_a_long_queue_of_others_sends_prompts_home_until_it_is_worked_off() -> None:
    placement = measured(queued=10_000)
    assert placement.decide(BESIDE_STREAMS, TARGET, 0.0) == LOCAL
    assert placement.decide(BESIDE_STREAMS, TARGET, 5.0) == REMOTE


def test_a_queue_that_others_fill_meanwhile_sends_prompts_home() -> None:
    placement = measured()
    placement.ordered(TARGET, "own", 256, 0, 1.0)
    few = PromptSize(256, 0, 0, 1)
    assert placement.decide(few, TARGET, 1.1) == REMOTE
    placement.heard(TARGET.boot_id, PrefillLoad(40_000, RATE), 1.1)
    assert placement.decide(few, TARGET, 1.1) == LOCAL
    placement.heard(new_id(), PrefillLoad(0, RATE), 1.1)
    assert placement.decide(few, TARGET, 1.1) == LOCAL, "another node's news"
    placement.heard(TARGET.boot_id, PrefillLoad(256, RATE), 1.2)
    assert placement.decide(few, TARGET, 1.2) == REMOTE


def test_a_prefill_node_that_does_not_answer_gets_no_more() -> None:
    placement = measured()
    placement.ordered(TARGET, "stuck", 256, 0, 1.0)
    assert placement.decide(BESIDE_STREAMS, TARGET, 1.1) == REMOTE
    assert placement.decide(BESIDE_STREAMS, TARGET, 3.0) == LOCAL


def test_after_a_failure_prompts_stay_until_the_probe() -> None:
    placement = measured()
    placement.ordered(TARGET, "lost", 256, 0, 1.0).failed("lost", 1.5)
    failed = PlacementDecision(PrefillSource.LOCAL, PrefillReason.FAILED)
    assert placement.decide(BESIDE_STREAMS, TARGET, 2.0) == failed
    later = next(now for now in range(3, 1000) if placement.decide(BESIDE_STREAMS, TARGET, now) != failed)
    assert placement.decide(BESIDE_STREAMS, TARGET, later) == PROBE


def test_a_restarted_prefill_node_is_another_one() -> None:
    placement = measured()
    placement.ordered(TARGET, "lost", 256, 0, 1.0).failed("lost", 1.5)
    again = PrefillTarget(TARGET.name, TARGET.control, new_id())
    assert placement.decide(BESIDE_STREAMS, again, 2.0) == PROBE
    placement.ordered(again, "new", 256, 0, 2.0)
    assert [node.name for node in placement.stats(2.0).nodes] == [TARGET.name]


def test_an_old_measurement_of_this_node_is_tried_again_with_a_short_prompt() -> None:
    placement = measured(local_rate=RATE / 2)
    assert placement.decide(ALONE, TARGET, 1.0) == REMOTE
    now = STALE_S + 1
    placement.ordered(TARGET, "newer", 256, 0, now - 1).answered("newer", 0, PrefillLoad(0, RATE), now - 1 + 256 / RATE)
    assert placement.decide(ALONE, TARGET, now) == LOCAL
    assert placement.decide(PromptSize(2048, 0, 0, 0), TARGET, now) == REMOTE


def test_one_block_is_never_fetched_and_settings_are_obeyed() -> None:
    for mode in (Disaggregation.ALWAYS, Disaggregation.AUTO):
        short = make_placement(16, mode).decide(PromptSize(16, 64, 0, 9), TARGET, 0.0)
        assert short == PlacementDecision(PrefillSource.LOCAL, PrefillReason.SHORT)
    always = make_placement(16, Disaggregation.ALWAYS).decide(PromptSize(17, 0, 0, 0), TARGET, 0.0)
    never = make_placement(16, Disaggregation.NEVER).decide(PromptSize(5000, 0, 0, 9), TARGET, 0.0)
    assert (always.source, always.reason) == (PrefillSource.REMOTE, PrefillReason.SETTING)
    assert (never.source, never.reason) == (PrefillSource.LOCAL, PrefillReason.SETTING)


def test_what_it_knows_is_shown_and_old_nodes_are_forgotten() -> None:
    placement = measured()
    placement.count(placement.decide(BESIDE_STREAMS, TARGET, 1.0))
    stats = placement.stats(1.0)
    assert [(made.source, made.reason, made.count) for made in stats.decisions] == [
        (PrefillSource.REMOTE, PrefillReason.CHEAPER, 1)
    ]
    assert stats.tokens_per_s == RATE and stats.nodes[0].tokens_per_s == RATE
    assert 0 < stats.last_remote_s < stats.last_local_s
    placement.ordered(TARGET, "queued", 700, 0, 1.0).landed(2_000_000, 0.001)
    (node,) = placement.stats(1.0).nodes
    assert (node.name, node.queued_tokens, node.bytes_per_s) == (TARGET.name, 700, 2e9)
    assert node.overhead_s > 0
    for i in range(300):
        target = PrefillTarget(f"p{i}", "tcp://127.0.0.1:1", new_id())
        placement.ordered(target, i, 256, 0, 2.0).withdrawn(i)
    assert len(placement.stats(2.0).nodes) < 100
