"""Tests what the network policies mean: who reaches which port."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import Rendering, Workload, container, named, of_kind, workload
from tests.deploy.network_policies import Peer, lets_through

POLICIES = of_kind(Rendering.CPU, "NetworkPolicy")


def peer_of(which: Workload) -> Peer:
    ports = {port["name"]: port["containerPort"] for port in container(Rendering.CPU, which)["ports"]}
    return Peer(workload(Rendering.CPU, which)["spec"]["template"]["metadata"]["labels"], ports=ports)


PROXY, PREFILL, DECODE = map(peer_of, (Workload.PROXY, Workload.PREFILL, Workload.DECODE))
PODS = {"proxy": PROXY, "prefill": PREFILL, "decode": DECODE}
CLIENTS = {
    "a labelled pod here": Peer({"pdserve-client": "true"}),
    "a pod of a labelled namespace": Peer({}, "apps", {"pdserve-client": "true"}),
}
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")
STRANGERS = {
    "a pod here": Peer({"app": "other"}),
    "a pod elsewhere": Peer({}, "apps"),
    "a labelled pod elsewhere": Peer({"pdserve-client": "true"}, "apps"),
    "a pod elsewhere with the labels of a node": Peer(DECODE.labels, "apps"),
    "a pod that calls itself prometheus": Peer(PROMETHEUS.labels, "apps"),
    "another pod of Prometheus' namespace": Peer({}, "monitoring"),
}
DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")
UCX_PORTS = range(42000, 43000)


def reached(source: Peer, target: Peer) -> set[int]:
    """Returns the ports of ``target`` that ``source`` reaches, of those that something may listen to."""
    candidates = {22, 53, 80, 443, 8000, 8001, 8100, 8200, UCX_PORTS[0] - 1, *UCX_PORTS, UCX_PORTS[-1] + 1}
    return {port for port in candidates if lets_through(POLICIES, source, target, port)}


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_reach_the_proxies_http_port_alone(name: str) -> None:
    assert [reached(CLIENTS[name], pod) for pod in PODS.values()] == [{8000}, set(), set()]


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_reach_nothing(name: str) -> None:
    assert [reached(STRANGERS[name], pod) for pod in PODS.values()] == [set(), set(), set()]


def test_prometheus_reaches_metrics_alone() -> None:
    assert [reached(PROMETHEUS, pod) for pod in PODS.values()] == [{8000}, {8001}, {8001}]


@pytest.mark.parametrize("node", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_proxies_reach_nodes_and_nodes_the_proxies_control_port(node: Peer) -> None:
    assert reached(PROXY, node) == {8001}
    assert reached(node, PROXY) == {8100}
    assert reached(PROXY, PROXY) == set()


@pytest.mark.parametrize("source", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("target", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_nodes_reach_each_others_transfer_ports(source: Peer, target: Peer) -> None:
    assert reached(source, target) == {8200, *UCX_PORTS}


def test_the_range_is_the_one_that_ucx_is_told() -> None:
    first, last = named(Rendering.CPU, "ConfigMap", "pdserve-settings")["data"]["PDSERVE_UCX_TCP_PORTS"].split("-")
    assert range(int(first), int(last) + 1) == UCX_PORTS


@pytest.mark.parametrize("name", PODS)
def test_pods_reach_nothing_outside_but_dns(name: str) -> None:
    for outside in (Peer({}), Peer({}, "apps"), Peer({}, "kube-system")):
        assert reached(PODS[name], outside) == set()
    assert reached(PODS[name], DNS) == {53}
    assert lets_through(POLICIES, PODS[name], DNS, 53, "UDP")


@pytest.mark.parametrize("name", PODS)
def test_pods_reach_the_dns_cache_of_their_host_and_no_other_address_there(name: str) -> None:
    assert reached(PODS[name], Peer({}, "", address="169.254.20.10")) == {53}
    for address in ("169.254.20.11", "169.254.169.254", "10.96.0.1", "8.8.8.8"):
        assert reached(PODS[name], Peer({}, "", address=address)) == set()


@pytest.mark.parametrize(
    ("address", "let_in"), [("10.1.2.3", True), ("10.1.9.1", False), ("10.2.0.1", False), ("", False)]
)
def test_a_block_of_addresses_lets_its_own_through_but_for_its_exceptions(address: str, let_in: bool) -> None:
    block = {"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.1.9.0/24"]}}
    spec = {
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [block], "ports": [{"protocol": "TCP", "port": 80}]}],
    }
    policy = {"metadata": {"namespace": "pdserve"}, "spec": spec}
    assert lets_through([policy], Peer({}, "", address=address), PROXY, 80) is let_in


@pytest.mark.parametrize("name", PODS)
def test_only_nodes_that_fetch_a_model_reach_the_hub_and_no_private_address(name: str) -> None:
    fetching = of_kind(Rendering.HUB, "NetworkPolicy")
    for address in ("8.8.8.8", "2001:4860:4860::8888"):
        hub = Peer({}, "", address=address)
        assert lets_through(fetching, PODS[name], hub, 443) is (name != "proxy")
        assert not lets_through(fetching, PODS[name], hub, 80)
        assert not lets_through(POLICIES, PODS[name], hub, 443)
    for address in ("10.96.0.1", "169.254.169.254", "192.168.1.1", "fd00::1"):
        assert not lets_through(fetching, PODS[name], Peer({}, "", address=address), 443)
