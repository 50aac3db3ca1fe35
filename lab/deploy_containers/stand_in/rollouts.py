"""What the controllers of Deployments and StatefulSets do next, given the pods that are there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.deploy_containers.stand_in.manifests import ManifestError, RollingUpdate, Workload, WorkloadKind


@dataclass(frozen=True)
class PodState:
    """A controller sees this of each of its pods."""

    name: str
    ordinal: int
    revision: str
    """Which version of the workload's template the pod was made of."""
    ready: bool
    """The pod is ready. A pod of a Deployment has to have been so for ``minReadySeconds``."""
    terminating: bool


@dataclass(frozen=True)
class Changes:
    create: Sequence[int] = ()
    """The ordinals of new pods. A Deployment's pods have them too, only to tell them apart."""
    delete: Sequence[str] = ()


def next_changes(workload: Workload, revision: str, pods: Sequence[PodState]) -> Changes:
    """Returns what the workload's controller does now. It does nothing else before something has changed."""
    if workload.kind is WorkloadKind.STATEFUL_SET:
        return _stateful_set(workload, revision, pods)
    strategy = workload.spec.strategy
    if strategy.type == "Recreate":
        return _recreated(workload.spec.replicas, revision, pods)
    return _deployment(workload.spec.replicas, strategy.rolling_update, revision, pods)


def _stateful_set(workload: Workload, revision: str, pods: Sequence[PodState]) -> Changes:
    """One by one, the highest ordinal first, and each only when all that were replaced before it are ready."""
    spec = workload.spec
    if spec.update_strategy.type != "RollingUpdate" or spec.update_strategy.rolling_update.partition:
        raise ManifestError(f"{workload.metadata.name}: only a rolling update of all pods is done here")
    by_ordinal = {pod.ordinal: pod for pod in pods}
    surplus = [pod for pod in pods if pod.ordinal >= spec.replicas and not pod.terminating]
    if surplus:
        return Changes(delete=[max(surplus, key=lambda pod: pod.ordinal).name])
    missing = [ordinal for ordinal in range(spec.replicas) if ordinal not in by_ordinal]
    if missing and spec.pod_management_policy == "OrderedReady":
        settled = all(pod.ready and not pod.terminating for pod in pods if pod.ordinal < missing[0])
        missing = missing[:1] if settled else []
    if missing:
        return Changes(create=missing)
    for pod in sorted(pods, key=lambda pod: pod.ordinal, reverse=True):
        if pod.revision != revision and not pod.terminating:
            return Changes(delete=[pod.name])
        if not pod.ready or pod.terminating:
            break
    return Changes()


def _recreated(replicas: int, revision: str, pods: Sequence[PodState]) -> Changes:
    old = [pod for pod in pods if pod.revision != revision]
    if old:
        return Changes(delete=[pod.name for pod in old if not pod.terminating])
    return Changes(create=_free_ordinals(pods, replicas - sum(not pod.terminating for pod in pods)))


def _deployment(replicas: int, update: RollingUpdate, revision: str, pods: Sequence[PodState]) -> Changes:
    """At most ``maxSurge`` pods more than wanted, and at most ``maxUnavailable`` fewer that are ready."""
    surge = _share(update.max_surge, replicas, up=True)
    unavailable = _share(update.max_unavailable, replicas, up=False)
    if surge == unavailable == 0:
        unavailable = 1
    # Pods that end count neither as there nor as ready.
    live = [pod for pod in pods if not pod.terminating]
    new = [pod for pod in live if pod.revision == revision]
    old = [pod for pod in live if pod.revision != revision]
    wanted = min(replicas - len(new), replicas + surge - len(live))
    spare = sum(pod.ready for pod in live) - (replicas - unavailable)
    ready_old = [pod for pod in old if pod.ready]
    leaving = [pod for pod in old if not pod.ready] + ready_old[: max(0, spare)]
    surplus = sorted(new, key=lambda pod: pod.ready)[: max(0, len(new) - replicas)]
    return Changes(create=_free_ordinals(pods, wanted), delete=[pod.name for pod in [*leaving, *surplus]])


def _share(given: str | int, replicas: int, *, up: bool) -> int:
    if isinstance(given, int):
        return given
    part = replicas * float(given.removesuffix("%")) / 100
    return math.ceil(part) if up else math.floor(part)


def _free_ordinals(pods: Sequence[PodState], count: int) -> list[int]:
    first = max((pod.ordinal for pod in pods), default=-1) + 1
    return list(range(first, first + max(0, count)))
