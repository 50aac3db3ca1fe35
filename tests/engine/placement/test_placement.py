"""Tests where a decode node places prompts in the situations that placement is made for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.config import Disaggregation
from pdserve.engine.placement.latency_targets import NONE_OWN, OwnItl
from pdserve.engine.placement.placement import STALE_S, Placement
from pdserve.engine.placement.placement_rule import PlacementDecision, PromptSize
from pdserve.engine.placement.step_cost import StepCost
from pdserve.wire.engine import PrefillReason, PrefillSource
from pdserve.wire.ids import new_id
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import PrefillLoad
from tests.engine.placements import make_placement

TARGET = PrefillTarget("p0", "tcp://127.0.0.1:1", new_id())
RATE = 2000.0
ALONE = PromptSize(256, 0, 0, 0)
BESIDE_STREAMS = PromptSize(256, 0, 0, 4)

LOCAL = PlacementDecision(PrefillSource.LOCAL, PrefillReason.SOONER)
IN_TIME = PlacementDecision(PrefillSource.REMOTE, PrefillReason.TARGET)
REMOTE = PlacementDecision(PrefillSource.REMOTE, PrefillReason.SOONER)
LATE = PlacementDecision(PrefillSource.REMOTE, PrefillReason.LATE)
PROBE = PlacementDecision(PrefillSource.REMOTE, PrefillReason.PROBE)


def measured(
    remote_rate: float = RATE,
    queued: int = 0,
    local_rate: float = RATE,
    remote_streams: int = 0,
    target_ttft_ms: float = 0.0,
    target_itl_ms: float = 0.0,
) -> Placement:
    """Returns a placement for which this node and a prefill node have both computed a prompt at 0 s."""
    step_cost = StepCost()
    step_cost.observe(0, 0, 256, 256 / local_rate, now=0.0)
    placement = make_placement(
        16, Disaggregation.AUTO, step_cost, target_ttft_ms=target_ttft_ms, target_itl_ms=target_itl_ms
    )
    seconds = 256 / remote_rate
    node = placement.ordered(TARGET, "first", 256, 0, -seconds)
    node.answered("first", 0, PrefillLoad(queued, remote_rate, remote_streams), 0.0)
    return placement


def busy(ahead: int, remote_streams: int = 0, target_itl_ms: float = 0.0) -> Placement:
    """Returns one where steps of four requests take 10 ms, and a prefill node has so many tokens to compute at 1 s."""
    placement = measured(remote_streams=remote_streams, target_itl_ms=target_itl_ms)
    for _ in range(8):
        placement.step_cost.observe(4, 0, 0, 0.01)
    placement.ordered(TARGET, "ahead", ahead, 0, 1.0)
    return placement


def test_an_unknown_prefill_node_is_tried() -> None:
    assert make_placement(16, Disaggregation.AUTO).decide(ALONE, TARGET, 0.0) == PROBE


def test_one_prompt_of_those_that_come_at_once_is_the_probe() -> None:
    """The others are placed as if the prefill node were like this one."""
    unknown = make_placement(16, Disaggregation.AUTO)
    assert unknown.decide(replace(BESIDE_STREAMS, leaving_tokens=256), TARGET, 0.0) == LOCAL
    assert unknown.decide(PromptSize(256, 0, 4000, 4, leaving_tokens=256), TARGET, 0.0) == REMOTE


def test_alone_on_equal_hardware_nothing_is_moved() -> None:
    assert measured().decide(ALONE, TARGET, 1.0) == LOCAL


def test_streams_are_protected() -> None:
    assert measured().decide(BESIDE_STREAMS, TARGET, 1.0) == IN_TIME


def test_of_two_mixed_nodes_only_the_one_with_fewer_streams_computes_for_the_other() -> None:
    assert measured(remote_streams=4).decide(BESIDE_STREAMS, TARGET, 1.0) == LOCAL
    assert measured(remote_streams=3).decide(BESIDE_STREAMS, TARGET, 1.0) == IN_TIME


def test_a_prompt_for_which_the_prefill_node_would_be_late_is_computed_where_it_is_sooner() -> None:
    placement = measured()
    placement.ordered(TARGET, "ahead", 256, 0, 1.0)
    assert placement.decide(BESIDE_STREAMS, TARGET, 1.0) == LOCAL
    assert placement.decide(replace(BESIDE_STREAMS, queued_tokens=512), TARGET, 1.0) == REMOTE
    assert placement.decide(BESIDE_STREAMS, TARGET, 1.0 + 128 / RATE) == IN_TIME, "half of what was ahead is done"


def test_a_prompt_that_has_waited_is_late_sooner() -> None:
    assert measured().decide(replace(BESIDE_STREAMS, waited_s=0.2), TARGET, 1.0) == LOCAL


def test_the_operators_target_decides_what_is_late() -> None:
    placement = measured(target_ttft_ms=1000.0)
    placement.ordered(TARGET, "ahead", 512, 0, 1.0)
    assert placement.decide(BESIDE_STREAMS, TARGET, 1.0) == IN_TIME
    placement.ordered(TARGET, "next", 512, 0, 1.0)
    assert placement.decide(BESIDE_STREAMS, TARGET, 1.0) == LOCAL


def test_a_requests_own_target_decides_what_is_late_for_it() -> None:
    placement = measured(target_ttft_ms=1000.0)
    placement.ordered(TARGET, "ahead", 1024, 0, 1.0)
    assert placement.decide(replace(BESIDE_STREAMS, own_ttft_ms=300.0), TARGET, 1.0) == LOCAL
    placement.ordered(TARGET, "next", 1024, 0, 1.0)
    patient = replace(BESIDE_STREAMS, own_ttft_ms=5000.0)
    assert placement.decide(patient, TARGET, 1.0) == IN_TIME
    # With may_wait, the order does not lengthen the prefill node's queue beyond the node's own target.
    assert placement.decide(replace(patient, may_wait=True), TARGET, 1.0) == replace(IN_TIME, source=None)


def test_a_prompt_goes_where_it_surely_comes_in_time_if_streams_here_can_bear_its_chunks() -> None:
    placement = busy(512)
    beside = replace(BESIDE_STREAMS, rows=4, own_itl=OwnItl(0.1, all_have=True))
    # The prefill node has to compute 768 tokens first, in 0.384 s.
    assert placement.decide(replace(beside, own_ttft_ms=700.0), TARGET, 1.0) == LOCAL
    assert placement.decide(replace(beside, own_ttft_ms=800.0), TARGET, 1.0) == IN_TIME
    # Where a step takes most of what its streams want, its prompts would be cut into pieces that break it, too.
    short = replace(beside, own_ttft_ms=500.0, own_itl=OwnItl(0.015, all_have=True))
    assert placement.decide(short, TARGET, 1.0) == IN_TIME


def test_a_first_token_may_be_late_where_the_shortest_chunk_would_make_all_streams_late() -> None:
    placement = busy(512)
    # The prefill node needs 0.384 s. Eight tokens take 4 ms, beside 10 ms of decoding.
    beside = replace(BESIDE_STREAMS, rows=4, own_ttft_ms=300.0)
    assert placement.decide(replace(beside, own_itl=OwnItl(0.018, all_have=True)), TARGET, 1.0) == LOCAL
    broken = replace(beside, own_itl=OwnItl(0.012, all_have=True))
    assert placement.decide(broken, TARGET, 1.0) == IN_TIME
    # Decoding alone exceeds this target by a little; the mean of a stream's gaps may still keep it.
    assert placement.decide(replace(beside, own_itl=OwnItl(0.009, all_have=True)), TARGET, 1.0) == IN_TIME
    # This one it breaks by far, so it saves no stream to let the prompt wait.
    assert placement.decide(replace(beside, own_itl=OwnItl(0.007, all_have=True)), TARGET, 1.0) == LOCAL


def test_streams_are_made_late_for_a_prompt_only_if_its_first_token_then_comes_in_time() -> None:
    placement = busy(1024)
    # The prefill node needs 0.647 s. This node needs 0.256 s, in 13 steps of twice what decoding takes.
    beside = replace(BESIDE_STREAMS, rows=4, own_itl=OwnItl(0.012, all_have=True))
    assert placement.decide(replace(beside, own_ttft_ms=300.0), TARGET, 1.0) == LOCAL
    assert placement.decide(replace(beside, own_ttft_ms=240.0), TARGET, 1.0) == LATE
    assert placement.decide(replace(beside, own_ttft_ms=300.0, waited_s=0.1), TARGET, 1.0) == LATE
    # No first token is left to come more than three times as late as it should.
    assert placement.decide(replace(beside, own_ttft_ms=200.0), TARGET, 1.0) == LOCAL
    # One client's own target makes no other client's prompt late.
    one = replace(beside, own_ttft_ms=240.0, own_itl=OwnItl(0.012))
    assert placement.decide(one, TARGET, 1.0) == LOCAL


@pytest.mark.parametrize("streams", [4, 40])
def test_no_late_prompt_goes_where_as_many_streams_are(streams: int) -> None:
    placement = busy(1024, remote_streams=streams)
    late = replace(BESIDE_STREAMS, rows=4, own_itl=OwnItl(0.012, all_have=True), own_ttft_ms=240.0)
    assert placement.decide(late, TARGET, 1.0) == LOCAL


def test_a_late_prompt_that_waits_stays_once_the_prefill_node_would_be_very_late() -> None:
    placement = busy(1024)
    waits = replace(BESIDE_STREAMS, rows=4, own_itl=OwnItl(0.012, all_have=True), own_ttft_ms=240.0, may_wait=True)
    assert placement.decide(waits, TARGET, 1.0) == replace(LATE, source=None)
    assert placement.decide(replace(waits, waited_s=0.8), TARGET, 1.8) == LOCAL


@pytest.mark.parametrize(
    ("operators_ms", "own"),
    [(12.0, NONE_OWN), (12.0, OwnItl(0.030)), (30.0, OwnItl(0.012))],
    ids=["the operator's", "the operator's is tighter", "a request's is tighter"],
)
def test_so_it_may_by_whichever_target_is_tightest(operators_ms: float, own: OwnItl) -> None:
    placement = busy(512, target_itl_ms=operators_ms)
    beside = replace(BESIDE_STREAMS, rows=4, own_ttft_ms=300.0, own_itl=own)
    assert placement.decide(beside, TARGET, 1.0) == IN_TIME


def test_while_nobody_decodes_only_a_prompt_of_several_steps_could_hold_a_stream_up() -> None:
    placement = busy(512)
    for tokens, streams, itl_ms, there in (
        (512, 4, 12.0, IN_TIME),
        (512, 4, None, LOCAL),
        (256, 4, 12.0, LOCAL),
    ):
        prompt = PromptSize(tokens, 0, 0, streams, own_ttft_ms=400.0, own_itl_ms=itl_ms)
        assert placement.decide(prompt, TARGET, 1.0) == there, (tokens, streams, itl_ms)


def test_a_short_prompt_may_take_twice_what_a_short_step_takes() -> None:
    """A step takes 50 ms however short it is, so the rate of long chunks says nothing of it."""
    step_cost = StepCost()
    for _ in range(20):
        for tokens in (32, 256):
            step_cost.observe(0, 0, tokens, 0.05 + tokens / RATE)
    placement, load = make_placement(16, Disaggregation.AUTO, step_cost), PrefillLoad(0, step_cost.tokens_per_s)
    for at in range(20):
        placement.ordered(TARGET, at, 32, 0, at).answered(at, 0, load, at + 0.05 + 32 / RATE)
    short = PromptSize(32, 0, 0, 4)
    assert placement.decide(short, TARGET, 20.0) == IN_TIME
    assert placement.stats(20.0).last_local_s == pytest.approx(0.05 + 32 / RATE, rel=0.1)


def test_prompts_are_slower_beside_streams() -> None:
    placement = measured(target_itl_ms=30.0)
    for step in range(20):
        placement.step_cost.observe(4, 4000, 0, 0.02, now=step / 100)
    assert placement.tokens_per_s(0, 0, NONE_OWN) == pytest.approx(RATE)
    # Beside 20 ms of decoding there are 10 ms, in which there is time for 20 tokens.
    assert placement.tokens_per_s(4, 4000, NONE_OWN) == pytest.approx(20 / 0.03, rel=0.1)
    # Of requests that all have twice as much time, a step takes 60 ms, and 80 tokens.
    assert placement.tokens_per_s(4, 4000, OwnItl(0.06, True)) == pytest.approx(80 / 0.06, rel=0.1)


def test_a_burst_on_an_idle_pair_is_shared() -> None:
    """What is decided in one step is counted, though no order has left."""
    placement, went = measured(), []
    queued = leaving = 0
    for admitted in range(16):
        decision = placement.decide(PromptSize(256, 0, queued, admitted, leaving_tokens=leaving), TARGET, 1.0)
        went.append(decision)
        queued += 256 * (decision.source is PrefillSource.LOCAL)
        leaving += 256 * decision.remote
    assert went[:2] == [LOCAL, IN_TIME]
    assert 7 <= sum(decision.remote for decision in went) <= 9


def test_prompts_wait_for_whichever_node_is_free_first() -> None:
    placement = measured()
    placement.ordered(TARGET, "ahead", 700, 0, 1.0)
    waiting = PromptSize(256, 0, 2000, 4, may_wait=True)
    assert placement.decide(waiting, TARGET, 1.0).waits
    assert placement.decide(waiting, TARGET, 1.15) == REMOTE, "less than a target's work is left there"
    assert placement.decide(replace(waiting, queued_tokens=100), TARGET, 1.0) == LOCAL, "it is this node's turn"
    assert placement.decide(replace(waiting, may_wait=False), TARGET, 1.0) == REMOTE, "no step would follow"


def test_a_slow_prefill_node_is_used_where_chunks_beside_streams_are_slower_still() -> None:
    for placement, there in (
        (measured(remote_rate=RATE / 4), LOCAL),
        (measured(remote_rate=RATE / 4, target_itl_ms=1.0), REMOTE),
    ):
        for step in range(20):
            placement.step_cost.observe(4, 4000, 0, 0.02, now=step / 100)
        assert placement.decide(ALONE, TARGET, 1.0) == LOCAL
        assert placement.decide(replace(BESIDE_STREAMS, rows=4, context_tokens=4000), TARGET, 1.0) == there


def test_a_fast_prefill_node_is_used_by_an_idle_decode_node() -> None:
    assert measured(remote_rate=4 * RATE).decide(ALONE, TARGET, 1.0) == REMOTE


def test_a_long_queue_of_others_sends_prompts_home_until_it_is_worked_off() -> None:
    placement = measured(queued=10_000)
    assert placement.decide(BESIDE_STREAMS, TARGET, 0.0) == LOCAL
    assert placement.decide(BESIDE_STREAMS, TARGET, 5.0) == IN_TIME


def test_a_queue_that_others_fill_meanwhile_sends_prompts_home() -> None:
    placement = measured()
    placement.ordered(TARGET, "own", 256, 0, 1.0)
    few = PromptSize(256, 0, 0, 1)
    assert placement.decide(few, TARGET, 1.1) == IN_TIME
    placement.heard(TARGET.boot_id, PrefillLoad(40_000, RATE), 1.1)
    assert placement.decide(few, TARGET, 1.1) == LOCAL
    placement.heard(new_id(), PrefillLoad(0, RATE), 1.1)
    assert placement.decide(few, TARGET, 1.1) == LOCAL, "another node's news"
    placement.heard(TARGET.boot_id, PrefillLoad(100, RATE), 1.2)
    assert placement.decide(few, TARGET, 1.2) == IN_TIME


def test_a_prefill_node_that_does_not_answer_gets_no_more() -> None:
    placement = measured()
    placement.ordered(TARGET, "stuck", 256, 0, 1.0)
    assert placement.decide(BESIDE_STREAMS, TARGET, 1.1) == IN_TIME
    assert placement.decide(BESIDE_STREAMS, TARGET, 3.0) == LOCAL


def test_after_a_failure_prompts_stay_until_the_probe() -> None:
    placement = measured()
    placement.ordered(TARGET, "lost", 256, 0, 1.0).failed("lost", 1.5)
    failed = PlacementDecision(PrefillSource.LOCAL, PrefillReason.FAILED)
    assert placement.decide(BESIDE_STREAMS, TARGET, 2.0) == failed
    later = next(now for now in range(3, 1000) if placement.decide(BESIDE_STREAMS, TARGET, now) != failed)
    assert placement.decide(BESIDE_STREAMS, TARGET, later) == PROBE
    assert placement.decide(replace(BESIDE_STREAMS, leaving_tokens=256), TARGET, later) == failed, "one is enough"


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
    placement.count(PlacementDecision(None, PrefillReason.SOONER))
    stats = placement.stats(1.0)
    assert [(made.source, made.reason, made.count) for made in stats.decisions] == [
        (PrefillSource.REMOTE, PrefillReason.TARGET, 1)
    ]
    assert stats.tokens_per_s == RATE and stats.nodes[0].tokens_per_s == RATE
    assert 0 < stats.last_local_s < stats.last_remote_s
    placement.ordered(TARGET, "queued", 700, 0, 1.0).landed(2_000_000, 0.001)
    (node,) = placement.stats(1.0).nodes
    assert (node.name, node.queued_tokens, node.bytes_per_s) == (TARGET.name, 700, 2e9)
    assert node.overhead_s > 0
    for i in range(300):
        target = PrefillTarget(f"p{i}", "tcp://127.0.0.1:1", new_id())
        placement.ordered(target, i, 256, 0, 2.0).withdrawn(i)
    assert len(placement.stats(2.0).nodes) < 100
