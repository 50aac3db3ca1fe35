"""Tests the router's rules: where Services' connections go, and what NetworkPolicies let through."""

from __future__ import annotations

import pytest

from lab.deploy_containers.stand_in.made_manifests import a_policy
from lab.deploy_containers.stand_in.manifests import ManifestError, NetworkPolicy
from lab.deploy_containers.stand_in.packet_rules import Balancer, Endpoint, packet_rules

WEB = Endpoint("web-0", "10.0.0.1", "shop", {"app": "web"}, {"http": 8000})
DB = Endpoint("db-0", "10.0.0.2", "shop", {"app": "db"}, {"sql": 5432})
FAR = Endpoint("far", "10.0.0.3", "elsewhere", {"app": "web"}, {"http": 8080})


def chains(*policies: NetworkPolicy) -> dict[str, list[str]]:
    """Returns the rules by the endpoint that they are about and the direction, without the table around them."""
    found: dict[str, list[str]] = {}
    lines = packet_rules([], policies, [WEB, DB, FAR]).splitlines()
    for i, line in enumerate(lines):
        if line.startswith("comment "):
            end = lines.index("}", i)
            found[line.removeprefix("comment ").strip('"')] = lines[i + 1 : end]
    return found


def test_connections_to_a_service_go_to_one_of_its_pods() -> None:
    targets = [("10.0.0.1", 8000), ("10.0.0.2", 8001)]
    rules = packet_rules([Balancer("10.96.0.1", 80, targets), Balancer("10.96.0.2", 80, [])], [], [WEB])
    assert (
        "ip daddr 10.96.0.1 tcp dport 80 dnat to numgen random mod 2 map { 0 : 10.0.0.1 . 8000, 1 : 10.0.0.2 . 8001 }"
        in rules
    )
    assert "10.96.0.2" not in rules


def test_without_a_policy_nothing_is_kept_out() -> None:
    assert chains() == {}
    assert "drop" not in packet_rules([], [], [WEB])


def test_a_policy_without_rules_lets_nothing_through_where_it_says() -> None:
    deny = a_policy(podSelector={"matchLabels": {"app": "db"}}, policyTypes=["Ingress"])
    assert chains(deny) == {"Ingress of db-0": ["drop"]}
    assert "ip daddr 10.0.0.2 jump ingress_1" in packet_rules([], [deny], [WEB, DB, FAR])


def test_a_policy_is_about_its_own_namespace() -> None:
    everyone = a_policy(podSelector={}, policyTypes=["Egress"])
    assert set(chains(everyone)) == {"Egress of web-0", "Egress of db-0"}


def test_peers_are_of_the_policys_namespace_unless_it_names_others() -> None:
    web = {"matchLabels": {"app": "web"}}
    near = a_policy(
        podSelector={"matchLabels": {"app": "db"}},
        policyTypes=["Ingress"],
        ingress=[{"from": [{"podSelector": web}], "ports": [{"port": "sql"}]}],
    )
    assert chains(near)["Ingress of db-0"] == ["ip saddr 10.0.0.1 tcp dport 5432 return", "drop"]
    named = {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}
    far = a_policy(
        podSelector={"matchLabels": {"app": "db"}},
        policyTypes=["Ingress"],
        ingress=[{"from": [{"namespaceSelector": named, "podSelector": web}]}],
    )
    assert chains(far)["Ingress of db-0"] == ["ip saddr 10.0.0.3 return", "drop"]
    # Several policies allow together.
    assert chains(near, far)["Ingress of db-0"] == [
        "ip saddr 10.0.0.1 tcp dport 5432 return",
        "ip saddr 10.0.0.3 return",
        "drop",
    ]


def test_egress_goes_to_the_receivers_ports_and_ranges() -> None:
    policy = a_policy(
        podSelector={"matchLabels": {"app": "web"}},
        policyTypes=["Egress"],
        egress=[
            {"to": [{"podSelector": {}}], "ports": [{"port": "sql"}, {"port": 7000, "endPort": 7009}]},
            {"to": [{"ipBlock": {"cidr": "10.9.0.0/16", "except": ["10.9.1.0/24"]}}], "ports": [{"protocol": "UDP"}]},
        ],
    )
    assert chains(policy)["Egress of web-0"] == [
        "ip daddr 10.0.0.1 tcp dport 7000-7009 return",
        "ip daddr 10.0.0.2 tcp dport 5432 return",
        "ip daddr 10.0.0.2 tcp dport 7000-7009 return",
        "ip daddr 10.9.0.0/16 ip daddr != { 10.9.1.0/24 } meta l4proto udp return",
        "drop",
    ]


def test_a_rule_without_peers_is_for_everybody_and_a_port_that_nobody_has_is_refused() -> None:
    anybody = a_policy(
        podSelector={"matchLabels": {"app": "web"}}, policyTypes=["Ingress"], ingress=[{"ports": [{"port": "http"}]}]
    )
    assert chains(anybody)["Ingress of web-0"] == ["tcp dport 8000 return", "drop"]
    nobodys = a_policy(podSelector={}, policyTypes=["Egress"], egress=[{"ports": [{"port": "http"}]}])
    with pytest.raises(ManifestError, match="whose port is http"):
        chains(nobodys)
