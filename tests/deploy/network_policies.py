"""Says which connections the rendered network policies let through, as Kubernetes would decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from tests.deploy.manifests import Manifest


@dataclass(frozen=True)
class Peer:
    """A pod, by the labels that policies go by."""

    labels: Mapping[str, str]
    namespace: str = "pdserve"
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """The container's named ports."""
    address: str = ""
    """What an ``ipBlock`` goes by. Without one, none is about the peer: addresses of pods come and go."""

    @property
    def all_namespace_labels(self) -> Mapping[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace, **self.namespace_labels}


def lets_through(policies: Sequence[Manifest], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether ``source`` may open a connection to ``port`` of ``target``."""
    return _side(policies, "Egress", source, target, target, port, protocol) and _side(
        policies, "Ingress", target, source, target, port, protocol
    )


def _side(
    policies: Sequence[Manifest], direction: str, own: Peer, other: Peer, target: Peer, port: int, protocol: str
) -> bool:
    """Whether the policies of ``own`` allow ``direction``. Where none is about it, everything is allowed."""
    concerned = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == own.namespace
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], own.labels)
    ]
    rules = [rule for spec in concerned for rule in spec.get(direction.lower(), [])]
    others = "from" if direction == "Ingress" else "to"
    return not concerned or any(
        any(_is_peer(peer, other, own.namespace) for peer in rule[others])
        and any(_is_port(entry, target, port, protocol) for entry in rule["ports"])
        for rule in rules
    )


def _is_peer(peer: Mapping[str, Any], other: Peer, namespace: str) -> bool:
    if "ipBlock" in peer:
        assert peer.keys() == {"ipBlock"}
        return _is_inside(peer["ipBlock"], other.address)
    if "namespaceSelector" in peer:
        if not _selects(peer["namespaceSelector"], other.all_namespace_labels):
            return False
    elif other.namespace != namespace:
        return False
    return _selects(peer.get("podSelector", {}), other.labels)


def _is_inside(block: Mapping[str, Any], address: str) -> bool:
    if not address:
        return False
    inside = [ip_address(address) in ip_network(each) for each in (block["cidr"], *block.get("except", ()))]
    return inside[0] and not any(inside[1:])


def _is_port(entry: Mapping[str, Any], target: Peer, port: int, protocol: str) -> bool:
    first = entry["port"] if isinstance(entry["port"], int) else target.ports.get(entry["port"])
    return entry["protocol"] == protocol and first is not None and first <= port <= entry.get("endPort", first)


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
