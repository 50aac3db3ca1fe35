"""Tests that rendered manifests are read whole, and refused where the stand-in would leave something out."""

from __future__ import annotations

import pytest
import yaml

from lab.deploy_containers.stand_in.made_manifests import deployment, service, stateful_set
from lab.deploy_containers.stand_in.manifests import ManifestError, quantity, read_manifests


def test_workloads_and_services_are_read_with_kubernetes_defaults() -> None:
    found = read_manifests(
        yaml.safe_dump_all([deployment(), service(), {"kind": "ServiceAccount", "metadata": {"name": "x"}}])
    )
    (workload,), (made,) = found.workloads, found.services
    assert workload.spec.template.container.port("http") == 8000
    assert workload.spec.template.spec.termination_grace_period_seconds == 30
    assert workload.spec.strategy.rolling_update.max_surge == "25%"
    assert not made.spec.headless
    assert found.not_run == ["ServiceAccount x"]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("spec", "template", "spec", "hostNetwork"), True, "hostNetwork"),
        (("spec", "template", "spec", "enableServiceLinks"), True, "variables of Services"),
        (("spec", "template", "spec", "volumes"), [{"name": "v", "hostPath": {"path": "/"}}], "hostPath"),
        (("spec", "template", "spec", "containers"), [], "one container"),
        (("spec", "selector", "matchLabels"), {"app": "other"}, "does not select its own pods"),
        (("kind",), "DaemonSet", "this kind is not known"),
    ],
)
def test_what_is_not_known_is_refused_by_name(path: tuple[str, ...], value: object, named: str) -> None:
    document = stateful_set()
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ManifestError, match=named):
        read_manifests(yaml.safe_dump(document))


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("2", 2.0), ("1.5", 1.5), ("3Gi", 3 * 2**30), ("8Ki", 8192)]
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == value


def test_a_quantity_in_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ManifestError, match="5E"):
        quantity("5E")
