"""Tests, without containers, what Prometheus is told, and that the rendered manifests can be run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.deploy_containers.__main__ import RENDERED
from lab.deploy_containers.fitting import fitted
from lab.deploy_containers.monitoring import FOR, configuration, dashboard_expressions, rules, target_file, targets
from lab.deploy_containers.reachability import Party, PortUse, may_reach
from lab.deploy_containers.stand_in.container_arguments import Identity, container_arguments, environment
from lab.deploy_containers.stand_in.manifests import Manifests, read_manifests
from lab.deploy_containers.stand_in.packet_rules import Endpoint, packet_rules

SECRETS = {"pdserve-secret": {"secret": "s" * 64}}


@pytest.fixture(scope="module")
def cluster() -> Manifests:
    return fitted(read_manifests((RENDERED / "cpu.yaml").read_text()), "localhost/pdserve:some")


@pytest.fixture(scope="module")
def monitoring() -> Manifests:
    return read_manifests((RENDERED / "monitoring.yaml").read_text())


def endpoints(cluster: Manifests) -> list[Endpoint]:
    """Returns a pod of each workload."""
    return [
        Endpoint(
            f"{workload.metadata.name}-0",
            f"10.244.0.{i}",
            workload.metadata.namespace,
            workload.spec.template.metadata.labels,
            {port.name: port.container_port for port in workload.spec.template.container.ports},
        )
        for i, workload in enumerate(cluster.workloads, 7)
    ]


def test_every_rendered_pod_can_be_run(cluster: Manifests) -> None:
    assert len(cluster.workloads) == 3
    for workload in cluster.workloads:
        pod = Identity("pod", "pdserve", "10.244.0.7", "/run/netns/pod", Path("/pods/pod"), [0], "10.244.0.2")
        variables = environment(workload.spec.template, pod, cluster, SECRETS)
        arguments = container_arguments(workload.spec.template, pod, variables)
        assert "localhost/pdserve:some" in arguments and "PDSERVE_DISAGGREGATION=always" in arguments
    assert "drop" in packet_rules([], cluster.policies, endpoints(cluster))


def test_prometheus_scrapes_every_pod_with_the_operators_labels(cluster: Manifests, monitoring: Manifests) -> None:
    (monitor,) = monitoring.monitors
    stranger = Endpoint("shop", "10.244.0.99", "shop", endpoints(cluster)[0].labels, {"http": 80})
    found = targets(monitor, 0, [*endpoints(cluster), stranger])
    assert [each["labels"]["pod"] for each in found] == [each.name for each in endpoints(cluster)]
    component = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
    assert {each["labels"][component] for each in found} == {"proxy", "prefill", "decode"}
    (job,) = configuration([monitor], Path("/f"))["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [str(target_file(Path("/f"), monitor, 0))]
    assert {"source_labels": [component], "target_label": "component"} in job["relabel_configs"]


def test_alerts_wait_for_less_and_are_the_same_otherwise(monitoring: Manifests) -> None:
    (given,) = monitoring.rules
    made = [rule for group in rules(monitoring.rules)["groups"] for rule in group["rules"]]
    wanted = [rule for group in given.spec.groups for rule in group.rules]
    assert [rule["expr"] for rule in made] == [rule.expr for rule in wanted]
    assert {rule.get("for") for rule in made} == {None, FOR}


def test_expressions_of_the_dashboard_have_no_variables_left(monitoring: Manifests) -> None:
    found = dashboard_expressions(monitoring, "pdserve")
    assert len(found) > 20
    assert not [expression for expression in found if "$" in expression]
    assert any('namespace="pdserve"' in expression and "[1m]" in expression for expression in found)


def test_who_may_reach_what() -> None:
    allowed = {
        (source, target, use)
        for source in Party
        for target in (Party.PROXY, Party.NODE)
        for use in PortUse
        if may_reach(source, target, use)
    }
    assert (Party.CLIENT, Party.PROXY, PortUse.HTTP) in allowed
    assert (Party.CLIENT, Party.NODE, PortUse.HTTP) not in allowed
    assert not [each for each in allowed if each[0] in (Party.NEIGHBOUR, Party.OUTSIDER)]
