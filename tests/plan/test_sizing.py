"""Tests that the smallest cluster is found, and that what no cluster can keep is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from pdserve.config import TargetsConfig
from pdserve.errors import PlanError
from pdserve.plan.cluster import ClusterShape
from pdserve.plan.load import PlannedRequest, poisson_load, read_lengths
from pdserve.plan.prediction import PlanTargets, Prediction, predict
from pdserve.plan.sizing import Sizing, checked_sizing, neighbours
from tests.plan.profiles import profile_of


def load_of(rate: float) -> list[PlannedRequest]:
    return poisson_load(rate, 250, read_lengths("256"), read_lengths("64"), seed=2)


def sizing(load: Sequence[PlannedRequest], wanted: PlanTargets, most: int = 16) -> tuple[Sizing, list[ClusterShape]]:
    asked: list[ClusterShape] = []

    def of(shape: ClusterShape) -> Prediction:
        asked.append(shape)
        return predict(profile_of(), shape, load, wanted)

    return Sizing(of, most, 1), asked


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

    chosen = Sizing(of, 12, 1).find().chosen
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

    chosen = Sizing(of, 64, 1).find().chosen
    assert chosen is not None and chosen.nodes == min(mixed, prefill + decode)
