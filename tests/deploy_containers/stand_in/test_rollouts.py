"""Tests the order in which controllers make and replace pods: step by step, and as properties of whole updates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.deploy_containers.stand_in.made_manifests import a_workload, deployment, stateful_set
from lab.deploy_containers.stand_in.manifests import ManifestError
from lab.deploy_containers.stand_in.rollouts import Changes, PodState, next_changes
from tests.examples import examples


def pod(ordinal: int, revision: str = "new", ready: bool = True, terminating: bool = False) -> PodState:
    return PodState(f"web-{ordinal}", ordinal, revision, ready, terminating)


def of_stateful_set(pods: list[PodState], **spec: Any) -> Changes:
    return next_changes(a_workload(stateful_set(**spec)), "new", pods)


def of_deployment(pods: list[PodState], **spec: Any) -> Changes:
    return next_changes(a_workload(deployment(**spec)), "new", pods)


def test_a_stateful_set_begins_with_one_pod_or_with_all() -> None:
    assert of_stateful_set([]) == Changes(create=[0])
    assert of_stateful_set([pod(0, ready=False)]) == Changes()
    assert of_stateful_set([pod(0)]) == Changes(create=[1])
    assert of_stateful_set([], podManagementPolicy="Parallel") == Changes(create=[0, 1, 2])


def test_a_stateful_set_replaces_the_highest_ordinal_first_and_waits_for_it() -> None:
    old = [pod(0, "old"), pod(1, "old"), pod(2, "old")]
    assert of_stateful_set(old) == Changes(delete=["web-2"])
    assert of_stateful_set([*old[:2], pod(2, "old", terminating=True)]) == Changes()
    assert of_stateful_set(old[:2]) == Changes(create=[2])
    assert of_stateful_set([*old[:2], pod(2, ready=False)]) == Changes()
    assert of_stateful_set([*old[:2], pod(2)]) == Changes(delete=["web-1"])


def test_a_stateful_set_with_too_many_pods_gives_up_the_highest() -> None:
    assert of_stateful_set([pod(0), pod(1)], replicas=1) == Changes(delete=["web-1"])


def test_a_partition_is_refused() -> None:
    with pytest.raises(ManifestError, match="only a rolling update of all pods"):
        of_stateful_set([], updateStrategy={"rollingUpdate": {"partition": 1}})


def test_recreate_lets_the_old_pods_end_before_it_makes_new_ones() -> None:
    recreate = {"strategy": {"type": "Recreate"}, "replicas": 1}
    assert of_deployment([pod(0, "old")], **recreate) == Changes(delete=["web-0"])
    assert of_deployment([pod(0, "old", terminating=True)], **recreate) == Changes(delete=[])
    assert of_deployment([], **recreate) == Changes(create=[0])


def test_a_deployment_makes_new_pods_first_where_none_may_be_missing() -> None:
    spec = {"replicas": 2, "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}
    old = [pod(0, "old"), pod(1, "old")]
    assert of_deployment(old, **spec) == Changes(create=[2], delete=[])
    assert of_deployment([*old, pod(2, ready=False)], **spec) == Changes(create=[], delete=[])
    assert of_deployment([*old, pod(2)], **spec) == Changes(create=[], delete=["web-0"])
    assert of_deployment([pod(0, "old", terminating=True), old[1], pod(2)], **spec) == Changes(create=[3], delete=[])


def test_an_old_pod_that_is_not_ready_goes_at_once() -> None:
    spec = {"replicas": 2, "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}
    assert of_deployment([pod(0, "old"), pod(1, "old", ready=False)], **spec).delete == ["web-1"]


@given(
    replicas=st.integers(1, 5),
    surge=st.sampled_from([0, 1, 2, "25%", "100%"]),
    unavailable=st.sampled_from([0, 1, "25%", "50%"]),
    data=st.data(),
)
@settings(max_examples=examples(50))
def test_an_update_of_a_deployment_ends_and_keeps_to_its_bounds(
    replicas: int, surge: int | str, unavailable: int | str, data: st.DataObject
) -> None:
    spec = {"replicas": replicas, "strategy": {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}}
    pods = {f"web-{i}": pod(i, "old") for i in range(replicas)}
    for _ in range(100):
        changes = of_deployment(list(pods.values()), **spec)
        for name in changes.delete:
            pods[name] = pod(pods[name].ordinal, pods[name].revision, pods[name].ready, terminating=True)
        for ordinal in changes.create:
            assert f"web-{ordinal}" not in pods
            pods[f"web-{ordinal}"] = pod(ordinal, ready=False)
        live = [each for each in pods.values() if not each.terminating]
        assert len(live) <= 2 * replicas
        if unavailable == 0 and surge != 0:
            assert sum(each.ready for each in live) >= replicas
        # One pod that was made becomes ready, or one that ends is gone.
        moving = [each for each in pods.values() if each.terminating or not each.ready]
        if not moving:
            break
        chosen = data.draw(st.sampled_from(moving))
        if chosen.terminating:
            del pods[chosen.name]
        else:
            pods[chosen.name] = pod(chosen.ordinal)
    assert len(pods) == replicas
    assert all(each.revision == "new" and each.ready for each in pods.values())
