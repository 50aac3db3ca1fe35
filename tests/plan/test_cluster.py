"""Tests the simulated cluster against what can be computed by hand, and against what no cluster may do."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.config import Disaggregation, TargetsConfig
from pdserve.engine.placement.latency_targets import MIXED_ITL_FACTOR
from pdserve.engine.placement.step_cost import StepParts
from pdserve.errors import PlanError
from pdserve.plan.cluster import ClusterShape, Lived, TokenGaps, live
from pdserve.plan.load import Lengths, PlannedRequest, poisson_load, read_lengths
from pdserve.plan.node import NodeStep, SimulatedNode
from pdserve.plan.profile import Profile
from pdserve.plan.sizing import PlanTargets, gap_quantiles, predict
from pdserve.wire.discovery import Role
from tests.examples import examples
from tests.plan.profiles import CACHE, PARTS, profile_of

MIXED = ClusterShape(mixed=1)
PAIR = ClusterShape(prefill=1, decode=1)
TOGETHER = ClusterShape(prefill=1, decode=1, nodes_per_machine=2)
"""A pair whose prefill node answers nothing."""
ANY = PlanTargets(0.0, 0.0)
SHAPES = (MIXED, ClusterShape(mixed=3), PAIR, ClusterShape(2, 3), ClusterShape(1, 1, nodes_per_machine=2))


def one(prompt: int, output: int, at_s: float = 0.0) -> PlannedRequest:
    return PlannedRequest(at_s, prompt, output)


def ttfts(lived: Lived) -> list[float]:
    return [answer.ttft_s for answer in lived.answers]


@pytest.mark.parametrize("prompt", [1, 16, 256, 257, 258, 1000])
@pytest.mark.parametrize("output", [1, 2, 40])
def test_a_lone_request_takes_the_sum_of_its_steps(prompt: int, output: int) -> None:
    profile = profile_of(msgspec.structs.replace(PARTS, context_token=1e-6))
    parts = profile.speed(1).steps
    (answer,) = live(profile, MIXED, [one(prompt, output, 3.0)]).answers
    chunks, done = [], 0
    while done < prompt:
        tokens = min(prompt - done, 256)
        if prompt - done == 257:
            tokens = 255
        chunks.append(parts.step_s(0, 0, tokens, done))
        done += tokens
    assert answer.ttft_s == pytest.approx(profile.front.request_s + sum(chunks))
    steps = [parts.step_s(1, prompt + 1 + number, 0) for number in range(output - 1)]
    assert answer.last_at - answer.first_at == pytest.approx(sum(steps))


def test_a_prefill_node_on_a_machine_of_its_own_answers_while_it_has_nothing_to_prefill() -> None:
    load = poisson_load(2.5, 300, read_lengths("32"), read_lengths("256"), 1)
    alone, apart, mixed, together = (
        live(profile_of(), shape, load) for shape in (MIXED, PAIR, ClusterShape(mixed=2), TOGETHER)
    )
    assert apart.busy_s[Role.PREFILL] > 0.5 * apart.busy_s[Role.DECODE]
    assert itl_p50(apart) < 1.1 * itl_p50(mixed) < itl_p50(alone)
    # On one machine it keeps to the prompts.
    assert together.busy_s[Role.PREFILL] < 0.2 * together.busy_s[Role.DECODE]


def itl_p50(lived: Lived) -> float:
    return gap_quantiles(lived.gaps, profile_of().speed(1), 50.0).p50


def test_a_prompt_that_goes_to_a_prefill_node_comes_later_by_the_transfer() -> None:
    profile = profile_of()
    there = live(profile, PAIR, [one(200, 3)], disaggregation=Disaggregation.ALWAYS)
    here = live(profile, PAIR, [one(200, 3)], disaggregation=Disaggregation.NEVER)
    transfer, blocks = profile.transfer, profile.cache.blocks(200)
    assert transfer is not None
    (late,), (soon,) = there.answers, here.answers
    assert late.ttft_s - soon.ttft_s == pytest.approx(transfer.fixed_s)
    moved_s = blocks * profile.cache.block_bytes * transfer.byte_s
    assert (late.last_at - late.first_at) - (soon.last_at - soon.first_at) == pytest.approx(moved_s)
    assert there.busy_s[Role.PREFILL] > 0 == here.busy_s[Role.PREFILL]


@pytest.mark.parametrize("utilisation", [0.3, 0.7])
def test_without_batching_waiting_times_are_those_of_a_single_server(utilisation: float) -> None:
    """Answers of one token with one place: M/D/1, whose mean waiting time Pollaczek and Khinchine give."""
    cache = msgspec.structs.replace(CACHE, max_num_seqs=1)
    profile = profile_of(cache=cache)
    service_s = profile.speed(1).steps.step_s(0, 0, 128)
    length = Lengths(((128, 128),), (1.0,))
    load = poisson_load(utilisation / service_s, 15_000, length, Lengths(((1, 1),), (1.0,)), seed=5)
    waited = statistics.fmean(ttfts(live(profile, MIXED, load))) - service_s - profile.front.request_s
    assert waited == pytest.approx(utilisation * service_s / (2 * (1 - utilisation)), rel=0.1)


def test_a_node_that_always_has_requests_answers_as_many_as_its_steps_allow() -> None:
    profile, rows, output = profile_of(), 8, 101
    profile = msgspec.structs.replace(profile, cache=msgspec.structs.replace(CACHE, max_num_seqs=rows))
    lived = live(profile, MIXED, [one(1, output)] * 400)
    # All of a batch begin in one step and end in one: a step of chunks, and then those that decode.
    parts = profile.speed(1).steps
    batch_s = parts.step_s(0, 0, rows) + (output - 1) * parts.step_s(rows, 0, 0)
    assert lived.ended_at == pytest.approx(400 / rows * batch_s, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_every_request_ends_once_with_all_its_tokens(shape: ClusterShape, rate: float) -> None:
    load = poisson_load(rate, 100, read_lengths("4-3000"), read_lengths("1-200"), seed=3)
    profile = profile_of(slower_beside=1.7)
    lived = live(profile, shape, load)
    for answer in lived.answers:
        assert answer.request.at_s < answer.first_at <= answer.last_at
    assert sum(gap.count for gap in lived.gaps) == sum(request.output_tokens - 1 for request in load)
    assert min(gap.seconds for gap in lived.gaps) > 0
    # What the gaps add up to is the time from first to last tokens.
    spans = sum(answer.last_at - answer.first_at for answer in lived.answers)
    assert sum(gap.seconds * gap.count for gap in lived.gaps) == pytest.approx(spans, rel=0.05)
    for role, busy_s in lived.busy_s.items():
        nodes = {Role.PREFILL: shape.prefill, Role.DECODE: shape.decode, Role.MIXED: shape.mixed}[role]
        assert 0 <= busy_s <= nodes * lived.ended_at * (1 + 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_load_is_lived_through_alike(shape: ClusterShape) -> None:
    load = poisson_load(6.0, 200, read_lengths("4-800"), read_lengths("1-100"), seed=9)
    first, second = (live(profile_of(), shape, load) for _ in range(2))
    assert [(a.first_at, a.last_at) for a in first.answers] == [(a.first_at, a.last_at) for a in second.answers]
    assert first.gaps == second.gaps


def _means(lived: Lived) -> tuple[float, float]:
    ends = [answer.last_at - answer.request.at_s for answer in lived.answers]
    return statistics.fmean(ttfts(lived)), statistics.fmean(ends)


@pytest.mark.parametrize("rate", [2.0, 7.0])
def test_more_nodes_are_not_worse_in_the_mean(rate: float) -> None:
    load = poisson_load(rate, 250, read_lengths("64-512"), read_lengths("16-128"), seed=11)
    means = [_means(live(profile_of(), ClusterShape(mixed=nodes), load)) for nodes in (1, 2, 4)]
    apart = [_means(live(profile_of(), ClusterShape(nodes, nodes), load)) for nodes in (1, 2, 4)]
    for found in (means, apart):
        for fewer, more in itertools.pairwise(found):
            assert more[1] <= fewer[1] * 1.01


@settings(max_examples=examples(10), deadline=None)
@given(st.sampled_from(StepParts.__struct_fields__), st.floats(1.05, 4.0), st.sampled_from((MIXED, TOGETHER)))
@example("chunk_alone", 2.5, MIXED)
def test_slower_steps_are_not_better_in_the_mean(part: str, factor: float, shape: ClusterShape) -> None:
    load = poisson_load(3.0, 120, read_lengths("64-512"), read_lengths("16-128"), seed=13)
    slower = msgspec.structs.replace(PARTS, **{part: factor * getattr(PARTS, part)})
    always = Disaggregation.ALWAYS
    usual = _means(live(profile_of(), shape, load, disaggregation=always))
    slow = _means(live(profile_of(slower), shape, load, disaggregation=always))
    # Other prompts meet in a step where steps end at other times, which moves the mean by some tenths of a percent.
    assert slow[1] >= usual[1] * 0.995


def test_nodes_that_share_a_machine_slow_each_other_down_only_while_both_compute() -> None:
    shared, profile = TOGETHER, profile_of(slower_beside=2.0)
    (alone,) = live(profile, shared, [one(200, 20)], disaggregation=Disaggregation.ALWAYS).answers
    (apart,) = live(profile, PAIR, [one(200, 20)], disaggregation=Disaggregation.ALWAYS).answers
    assert alone.last_at == pytest.approx(apart.last_at)
    # While the second prompt is computed, the first answer's steps take longer, and the prompt does too.
    load = [one(200, 60), one(200, 1, 0.3)]
    both = live(profile, shared, load, disaggregation=Disaggregation.ALWAYS).answers
    free = live(profile, PAIR, load, disaggregation=Disaggregation.ALWAYS).answers
    assert both[0].last_at > free[0].last_at + 0.05
    chunk_s = profile.speed(1).steps.step_s(0, 0, 200)
    # On machines of their own, the prefill node answers the second request itself, and nothing moves.
    assert both[1].ttft_s == pytest.approx(free[1].ttft_s + chunk_s + _moved_s(profile, 200), abs=0.02)


def _moved_s(profile: Profile, tokens: int) -> float:
    assert profile.transfer is not None
    return profile.transfer.seconds(CACHE.blocks(tokens) * CACHE.block_bytes)


def test_a_step_that_began_with_borrowed_cores_goes_on_without_them() -> None:
    profile = profile_of(slower_beside=2.0)
    shared = ClusterShape(mixed=2, nodes_per_machine=2)
    chunk_s = profile.speed(2).steps.step_s(0, 0, 200)
    load = [one(200, 1), one(200, 1, chunk_s / 2)]
    first, second = live(profile, shared, load, disaggregation=Disaggregation.NEVER).answers
    # Half of the first step is left when the other one begins, and takes twice as long. The other one is beside it all
    # the way: what has begun without cores does not get any.
    assert first.ttft_s == pytest.approx(profile.front.request_s + 1.5 * chunk_s)
    assert second.ttft_s == pytest.approx(profile.front.request_s + 2.0 * chunk_s)


def test_prompts_beside_streams_are_cut_to_keep_the_target() -> None:
    parts = PARTS
    load = [one(1, 400), one(1024, 2, 1.0)]
    longest = {}
    for itl_ms in (0.0, 60.0, 30.0):
        lived = live(profile_of(), MIXED, load, TargetsConfig(target_itl_ms=itl_ms))
        longest[itl_ms] = max(gap.seconds for gap in lived.gaps)
    assert 0.060 < longest[0.0] <= 1.01 * MIXED_ITL_FACTOR * parts.step_s(1, 0, 0)
    assert 0.030 < longest[60.0] <= 0.0601
    assert 0.015 < longest[30.0] <= 0.0301


def test_when_blocks_run_out_an_answer_is_computed_again_and_none_is_lost() -> None:
    cache = msgspec.structs.replace(CACHE, num_blocks=20)
    lived = live(profile_of(cache=cache), MIXED, [one(32, 200)] * 6)
    assert lived.preemptions > 0
    assert sum(gap.count for gap in lived.gaps) == 6 * 199
    roomy = live(profile_of(), MIXED, [one(32, 200)] * 6)
    assert roomy.preemptions == 0
    assert lived.ended_at > roomy.ended_at


def test_without_a_measured_transfer_no_prefill_node_is_predicted() -> None:
    alone = msgspec.structs.replace(profile_of(), transfer=None)
    assert live(alone, MIXED, [one(16, 2)]).answers[0].done
    with pytest.raises(PlanError, match=r"nothing of transfers.*--nodes 2"):
        live(alone, PAIR, [one(16, 2)])


def test_nodes_that_share_a_machine_learn_how_busy_their_neighbours_are() -> None:
    speed = profile_of(slower_beside=2.0).speed(2)
    busy, idle = (SimulatedNode(0, Role.DECODE, speed, CACHE, TargetsConfig(), Disaggregation.AUTO) for _ in range(2))
    step = NodeStep(4, 1000, count=20)
    for second in range(20):
        busy.learn(step, 20 * speed.beside.step_s(4, 1000, 0), True, float(second))
        idle.learn(step, 20 * speed.steps.step_s(4, 1000, 0), False, float(second))
    assert busy.cost.estimate_s(4, 1000, 0) == pytest.approx(speed.beside.step_s(4, 1000, 0), rel=0.1)
    assert idle.cost.estimate_s(4, 1000, 0) == pytest.approx(speed.steps.step_s(4, 1000, 0), rel=0.1)
    # Where each step finds the neighbour otherwise than the last one, both times are known.
    turns = SimulatedNode(0, Role.DECODE, speed, CACHE, TargetsConfig(), Disaggregation.AUTO)
    for second, parts in enumerate([speed.steps, speed.beside] * 100):
        turns.learn(NodeStep(4, 1000), parts.step_s(4, 1000, 0), parts is speed.beside, float(second))
    for turns.cost.borrowing, parts in ((True, speed.steps), (False, speed.beside)):
        assert turns.cost.estimate_s(4, 1000, 0) == pytest.approx(parts.step_s(4, 1000, 0), rel=0.1)
    assert turns.cost.spread < 0.1


@pytest.mark.parametrize(
    ("shape", "load", "wrong"),
    [
        (ClusterShape(prefill=2), [one(1, 1)], "needs a decode or a mixed node"),
        (ClusterShape(), [one(1, 1)], "no nodes"),
        (MIXED, [one(70_000, 1)], "--kv-cache-mib"),
        (ClusterShape(mixed=3, nodes_per_machine=3), [one(1, 1)], "3 nodes on one machine"),
        (MIXED, [], "no request"),
    ],
)
def test_what_cannot_be_served_is_refused(shape: ClusterShape, load: Sequence[PlannedRequest], wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong):
        live(profile_of(), shape, load)


def test_a_prediction_counts_good_answers_and_keeps_or_misses_targets() -> None:
    profile: Profile = profile_of()
    load = [one(200, 11, at) for at in (0.0, 10.0, 20.0, 20.01)]
    strict = predict(profile, MIXED, load, PlanTargets(0.15, 0.0), None)
    lax = predict(profile, MIXED, load, PlanTargets(1.0, 1.0), None)
    assert not strict.meets and lax.meets
    seconds = max(answer.last_at for answer in live(profile, MIXED, load).answers)
    assert lax.requests_per_s == pytest.approx(4 / seconds)
    assert lax.goodput == pytest.approx(4 / seconds)
    assert strict.goodput == pytest.approx(3 / seconds)
    assert lax.output_tokens_per_s == pytest.approx(44 / seconds)
    assert 0 < lax.busy[Role.MIXED] < 0.1


def test_the_spread_of_steps_widens_the_quantiles_of_gaps() -> None:
    lived = live(profile_of(), MIXED, [one(16, 100)])
    speed, wider = profile_of().speed(1), (0.8, 0.9, 1.0, 1.1, 1.2)
    even = gap_quantiles(lived.gaps, speed, 90)
    wide = gap_quantiles(lived.gaps, msgspec.structs.replace(speed, spread=wider), 90)
    assert wide.p50 == pytest.approx(even.p50)
    assert wide.p90 == pytest.approx(1.2 * even.p90)
    assert gap_quantiles([], speed, 90).p99 == 0.0


def test_gaps_beside_a_neighbour_have_a_spread_of_their_own() -> None:
    speed = msgspec.structs.replace(profile_of().speed(2), spread=(0.9, 1.1), spread_beside=(0.5, 1.5))
    found = gap_quantiles([TokenGaps(0.010, 90), TokenGaps(0.020, 10, beside=True)], speed, 96)
    assert (found.p50, found.p90, found.asked) == pytest.approx((0.010, 0.011, 0.030))
    only_alone = gap_quantiles(
        [TokenGaps(0.010, 90, beside=True)], msgspec.structs.replace(speed, spread_beside=()), 96
    )
    assert only_alone.asked == pytest.approx(0.011)


def test_machines_for_two_have_a_prefill_and_a_decode_node_where_there_are_enough() -> None:
    prefill, decode = Role.PREFILL, Role.DECODE
    assert ClusterShape(2, 3).roles() == [prefill, decode, prefill, decode, decode]


def test_a_cluster_that_falls_behind_does_not_keep_its_targets() -> None:
    wanted, targets = PlanTargets(0.0, 0.2), TargetsConfig(target_itl_ms=200.0)
    load = poisson_load(20.0, 600, read_lengths("256"), read_lengths("64"), seed=0)
    few, many = (predict(profile_of(), ClusterShape(mixed=nodes), load, wanted, targets) for nodes in (1, 12))
    assert few.keeps_itl and not few.keeps_up and not few.meets
    assert many.keeps_up and many.meets


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [MIXED, ClusterShape(mixed=2), PAIR, ClusterShape(2, 1), ClusterShape(2, 2)], ids=str)
def test_nodes_with_hardly_any_blocks_answer_everything_and_get_their_blocks_back(
    shape: ClusterShape, seed: int
) -> None:
    few = msgspec.structs.replace(CACHE, num_blocks=12 + seed, max_num_seqs=1 + 3 * (seed % 3))
    room = few.num_blocks * few.block_size // 2
    load = poisson_load(200.0, 40, read_lengths(f"1-{room}"), read_lengths(f"1-{room - 1}"), seed=seed)
    for disaggregation in (Disaggregation.AUTO, Disaggregation.ALWAYS):
        lived = live(profile_of(cache=few), shape, load, disaggregation=disaggregation)
        assert all(answer.done and answer.first_at <= answer.last_at for answer in lived.answers)
        assert sum(gap.count for gap in lived.gaps) == sum(request.output_tokens - 1 for request in load)
        assert lived.free_blocks == shape.nodes * few.num_blocks
        assert lived.least_free_blocks >= 0
