"""Tests that the smallest cluster is found, and that what no cluster can keep is said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import TargetsConfig
from pdserve.errors import PlanError
from pdserve.plan.cluster import ClusterShape
from pdserve.plan.load import PlannedRequest, poisson_load, read_lengths
from pdserve.plan.node import PendingPrompt, SimulatedNode
from pdserve.plan.sizing import (
    PlanTargets,
    Prediction,
    Sizing,
    check_itl,
    checked_sizing,
    least_nodes,
    neighbours,
    predict,
    predict_if_good,
)
from tests.examples import examples
from tests.plan.profiles import profile_of


def load_of(rate: float) -> list[PlannedRequest]:
    return poisson_load(rate, 250, read_lengths("256"), read_lengths("64"), seed=2)


def bursts(count: int, size: int, every_s: float) -> list[PlannedRequest]:
    """Returns so many bursts of requests that come at the same moment."""
    return [PlannedRequest(every_s * number, 64, 32) for number in range(count) for _ in range(size)]


def sizing(load: Sequence[PlannedRequest], wanted: PlanTargets, most: int = 16) -> tuple[Sizing, list[ClusterShape]]:
    asked: list[ClusterShape] = []

    def of(shape: ClusterShape) -> Prediction:
        return predict(profile_of(), shape, load, wanted)

    def if_good(shape: ClusterShape) -> Prediction | None:
        asked.append(shape)
        return predict_if_good(profile_of(), shape, load, wanted)

    return Sizing(of, if_good, most, 1), asked


def good(prediction: Prediction) -> Prediction | None:
    return prediction if prediction.meets else None


def test_the_smallest_cluster_keeps_the_targets_and_one_node_less_does_not() -> None:
    load, wanted = load_of(12.0), PlanTargets(ttft_s=0.5, itl_s=0.08)
    finder, asked = sizing(load, wanted)
    sized = checked_sizing(finder, "both")
    assert sized.chosen is not None
    assert len(asked) == len(set(asked)), "no cluster is lived through twice"
    by_shape = {prediction.shape: prediction for prediction in sized.tried}
    assert by_shape[sized.chosen].meets
    for shape in neighbours(sized.chosen):
        assert shape in by_shape
        if shape.nodes < sized.chosen.nodes:
            assert not by_shape[shape].meets


def test_little_load_needs_a_single_node() -> None:
    finder, _ = sizing(load_of(0.2), PlanTargets(1.0, 0.5))
    assert finder.find().chosen == ClusterShape(mixed=1)


def test_a_target_that_no_cluster_keeps_is_an_error_with_the_best_there_is() -> None:
    finder, _ = sizing(load_of(2.0), PlanTargets(ttft_s=0.01, itl_s=0.0), most=4)
    with pytest.raises(PlanError, match=r"no cluster that was tried keeps a TTFT.*--max-nodes"):
        checked_sizing(finder, "a TTFT of 10 ms")


@pytest.mark.parametrize(
    ("rate", "wanted"), [(6.0, PlanTargets(0.6, 0.04)), (6.0, PlanTargets(0.4, 0.06)), (8.0, PlanTargets(2.0, 0.2))]
)
def test_no_smaller_cluster_of_any_shape_would_do(rate: float, wanted: PlanTargets) -> None:
    load = poisson_load(rate, 80, read_lengths("64-1024"), read_lengths("16-128"), seed=3)
    targets = TargetsConfig(target_ttft_ms=wanted.ttft_s * 1e3, target_itl_ms=wanted.itl_s * 1e3)

    def of(shape: ClusterShape) -> Prediction:
        return predict(profile_of(), shape, load, wanted, targets)

    chosen = Sizing(of, lambda shape: good(of(shape)), 12, 1, least_nodes(profile_of(), load, 1)).find().chosen
    assert chosen is not None and of(chosen).meets
    for nodes in range(1, chosen.nodes):
        smaller = [ClusterShape(mixed=nodes), *(ClusterShape(p, nodes - p) for p in range(1, nodes))]
        assert not [str(shape) for shape in smaller if of(shape).meets]


@pytest.mark.parametrize(("prefill", "decode", "mixed"), [(3, 9, 20), (11, 2, 14), (30, 30, 13), (9, 20, 60)])
def test_among_large_clusters_the_smallest_is_found(prefill: int, decode: int, mixed: int) -> None:
    some = predict(profile_of(), ClusterShape(mixed=1), load_of(0.2)[:2], PlanTargets(0.0, 0.0))

    def of(shape: ClusterShape) -> Prediction:
        enough = shape.mixed >= mixed if shape.mixed else shape.prefill >= prefill and shape.decode >= decode
        return dataclasses.replace(some, shape=shape, keeps_up=enough)

    chosen = Sizing(of, lambda shape: good(of(shape)), 64, 1).find().chosen
    assert chosen is not None and chosen.nodes == min(mixed, prefill + decode)


@settings(max_examples=examples(15), deadline=None)
@given(
    st.floats(2.0, 30.0),
    st.sampled_from(
        [PlanTargets(0.5, 0.0), PlanTargets(0.0, 0.05), PlanTargets(1.0, 0.06, 99.0), PlanTargets(0.0, 0.5)]
    ),
    st.sampled_from([ClusterShape(mixed=1), ClusterShape(mixed=3), ClusterShape(1, 1), ClusterShape(2, 2)]),
    st.integers(0, 1000),
    st.booleans(),
)
def test_only_what_misses_the_targets_is_given_up_early(
    rate: float, wanted: PlanTargets, shape: ClusterShape, seed: int, whole_seconds: bool
) -> None:
    load = poisson_load(rate, 150, read_lengths("64-512"), read_lengths("1-64"), seed)
    if whole_seconds:
        load = [msgspec.structs.replace(request, at_s=math.floor(request.at_s)) for request in load]
    whole = predict(profile_of(), shape, load, wanted)
    assert predict_if_good(profile_of(), shape, load, wanted) == good(whole)


@pytest.mark.parametrize("load", [bursts(1, 300, 1.0), bursts(2, 200, 60.0), bursts(8, 200, 10.0)])
def test_requests_of_the_same_moment_do_not_look_like_falling_behind(load: list[PlannedRequest]) -> None:
    wanted, found = PlanTargets(30.0, 2.0), []
    for nodes in (2, 16):
        whole = predict(profile_of(), ClusterShape(mixed=nodes), load, wanted)
        assert predict_if_good(profile_of(), ClusterShape(mixed=nodes), load, wanted) == good(whole)
        found.append(whole.meets)
    assert found[-1], "16 nodes keep a TTFT of 30 s"


def test_a_hopeless_cluster_is_given_up_long_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0
    wait = SimulatedNode.wait

    def counting(node: SimulatedNode, prompt: PendingPrompt) -> None:
        nonlocal begun
        begun += 1
        wait(node, prompt)

    monkeypatch.setattr(SimulatedNode, "wait", counting)
    load = poisson_load(40.0, 1000, read_lengths("256"), read_lengths("64"), 0)
    assert predict_if_good(profile_of(), ClusterShape(mixed=1), load, PlanTargets(1.0, 0.0)) is None
    assert begun < len(load) / 2


@settings(max_examples=examples(6), deadline=None)
@given(st.floats(15.0, 25.0), st.sampled_from((0.0, 0.03, 0.06)), st.sampled_from((1, 2)), st.integers(0, 1000))
def test_fewer_nodes_than_the_least_do_not_keep_up(rate: float, itl_s: float, per_machine: int, seed: int) -> None:
    load = poisson_load(rate, 200, read_lengths("64-512"), read_lengths("16-128"), seed)
    profile, wanted = profile_of(slower_beside=1.5), PlanTargets(0.0, itl_s)
    targets = TargetsConfig(target_itl_ms=1e3 * itl_s)
    least = least_nodes(profile, load, per_machine, itl_s)
    assert least > 1
    fewer = [ClusterShape(mixed=least - 1, nodes_per_machine=per_machine)]
    if least > 2:
        fewer += [ClusterShape(1, least - 2, nodes_per_machine=per_machine)]
        fewer += [ClusterShape(least - 2, 1, nodes_per_machine=per_machine)]
    for shape in fewer:
        assert predict_if_good(profile, shape, load, wanted, targets) is None


@pytest.mark.parametrize("spread", [(1.0,), (0.8, 1.0, 1.1, 1.5)])
@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.0])
def test_an_itl_shorter_than_a_step_of_one_request_is_refused_and_no_other(
    spread: tuple[float, ...], percentile: float
) -> None:
    profile = profile_of()
    speed = msgspec.structs.replace(profile.speed(1), spread=spread)
    profile = msgspec.structs.replace(profile, speeds=(speed,))
    load = poisson_load(0.1, 20, read_lengths("64"), read_lengths("16"), 0)
    found = predict(profile, ClusterShape(mixed=1), load, PlanTargets(0.0, 1.0, percentile))
    check_itl(profile, load, 1, found.itl.asked * 1.001, percentile)
    with pytest.raises(PlanError, match=r"no number of nodes keeps an ITL p.* one request alone takes 1[1-9]"):
        check_itl(profile, load, 1, found.itl.asked * 0.999, percentile)
    check_itl(profile, [PlannedRequest(0.0, 64, 1)], 1, 1e-9, percentile)  # there is no gap


def test_the_least_nodes_of_a_large_load_are_not_far_from_enough() -> None:
    load, wanted = poisson_load(60.0, 3600, read_lengths("256"), read_lengths("64"), 0), PlanTargets(2.0, 0.1)
    least = least_nodes(profile_of(), load, 1, wanted.itl_s)
    targets = TargetsConfig(target_ttft_ms=2000.0, target_itl_ms=100.0)
    assert least > 8
    assert predict_if_good(profile_of(), ClusterShape(mixed=math.ceil(1.6 * least)), load, wanted, targets)


def test_more_work_than_the_most_nodes_can_do_is_said_at_once() -> None:
    def never(shape: ClusterShape) -> Prediction:
        raise AssertionError(f"{shape} was tried")

    with pytest.raises(PlanError, match=r"4 nodes are too few: .* 9 nodes busy.*--max-nodes"):
        Sizing(never, never, 4, 1, 9).find()


def test_without_transfers_only_mixed_nodes_are_looked_at() -> None:
    load, wanted = load_of(12.0), PlanTargets(ttft_s=0.5, itl_s=0.08)
    alone = msgspec.structs.replace(profile_of(), transfer=None)
    finder = Sizing(
        lambda shape: predict(alone, shape, load, wanted),
        lambda shape: predict_if_good(alone, shape, load, wanted),
        16,
        1,
        apart=False,
    )
    sized = finder.find()
    assert sized.chosen is not None and sized.chosen.mixed > 1
    assert all(prediction.shape.mixed for prediction in sized.tried)
