"""The router's rules, as text for ``nft``: Services' addresses, and what NetworkPolicies let through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lab.deploy_containers.stand_in.manifests import (
    ManifestError,
    NetworkPolicy,
    PolicyPeer,
    PolicyPort,
    PolicyRule,
    Selector,
)

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Kubernetes gives each namespace this label, with the namespace's name."""


@dataclass(frozen=True)
class Endpoint:
    """Something with an address: a pod, or somebody beside the cluster's pods."""

    name: str
    address: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """The ports that have names."""
    labels_of_namespace: Mapping[str, str] = field(default_factory=dict)

    @property
    def namespace_labels(self) -> Mapping[str, str]:
        return {NAMESPACE_LABEL: self.namespace, **self.labels_of_namespace}


@dataclass(frozen=True)
class Balancer:
    """One port of a Service, and where its connections go in turn."""

    address: str
    port: int
    targets: Sequence[tuple[str, int]]


def packet_rules(
    balancers: Iterable[Balancer], policies: Sequence[NetworkPolicy], endpoints: Sequence[Endpoint]
) -> str:
    """Returns a table that takes the place of the one before it, without a moment between the two."""
    lines = [
        "table ip cluster",
        "delete table ip cluster",
        "table ip cluster {",
        "chain services {",
        "type nat hook prerouting priority dstnat",
        *(_balance(each) for each in balancers if each.targets),
        "}",
    ]
    jumps = []
    for i, endpoint in enumerate(endpoints):
        own = [policy for policy in policies if _isolates(policy, endpoint)]
        for direction, of_self, of_other in (("Egress", "saddr", "daddr"), ("Ingress", "daddr", "saddr")):
            isolating = [policy for policy in own if direction in policy.spec.policy_types]
            if not isolating:
                continue
            chain = f"{direction.lower()}_{i}"
            lines += [f"chain {chain} {{", f'comment "{direction} of {endpoint.name}"']
            for policy in isolating:
                for rule in policy.spec.egress if direction == "Egress" else policy.spec.ingress:
                    lines += _allow(rule, direction, of_other, policy, endpoint, endpoints)
            lines += ["drop", "}"]
            jumps.append(f"ip {of_self} {endpoint.address} jump {chain}")
    lines += [
        "chain policies {",
        "type filter hook forward priority filter",
        # Policies are about who begins a connection.
        "ct state established,related accept",
        *jumps,
        "}",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _balance(balancer: Balancer) -> str:
    targets = ", ".join(f"{i} : {address} . {port}" for i, (address, port) in enumerate(balancer.targets))
    choice = f"numgen random mod {len(balancer.targets)} map {{ {targets} }}"
    return f"ip daddr {balancer.address} tcp dport {balancer.port} dnat to {choice}"


def _isolates(policy: NetworkPolicy, endpoint: Endpoint) -> bool:
    return policy.metadata.namespace == endpoint.namespace and policy.spec.pod_selector.selects(endpoint.labels)


def _allow(
    rule: PolicyRule,
    direction: str,
    of_other: str,
    policy: NetworkPolicy,
    endpoint: Endpoint,
    endpoints: Sequence[Endpoint],
) -> list[str]:
    """Returns the rules that let through what one rule of a policy allows: they leave the endpoint's chain."""
    ports = rule.ports or (None,)
    # A port that has a name is the receiver's.
    own = endpoint if direction == "Ingress" else None
    peers = rule.to if direction == "Egress" else rule.from_
    if not peers:
        return [f"{match}return" for port in ports if (match := _port(port, own)) is not None]
    found = []
    for peer in peers:
        if (block := peer.ip_block) is not None:
            but = f"ip {of_other} != {{ {', '.join(block.except_)} }} " if block.except_ else ""
            senders: list[tuple[str, Endpoint | None]] = [(f"{block.cidr} {but}", own)]
        else:
            chosen = [other for other in endpoints if _chosen(peer, policy.metadata.namespace, other)]
            senders = [(f"{other.address} ", own or other) for other in chosen]
        for match, receiver in senders:
            for port in ports:
                if (port_match := _port(port, receiver)) is not None:
                    found.append(f"ip {of_other} {match}{port_match}return")
    return found


def _chosen(peer: PolicyPeer, home: str, other: Endpoint) -> bool:
    near = other.namespace == home
    in_namespace = near if peer.namespace_selector is None else peer.namespace_selector.selects(other.namespace_labels)
    return in_namespace and (peer.pod_selector or Selector()).selects(other.labels)


def _port(port: PolicyPort | None, receiver: Endpoint | None) -> str | None:
    """Returns what matches a port in a rule: "" for any, or None where the receiver has no port of that name."""
    if port is None:
        return ""
    protocol = port.protocol.lower()
    number = port.port
    if number is None:
        return f"meta l4proto {protocol} "
    if isinstance(number, str):
        if receiver is None:
            raise ManifestError(f"whose port is {number}? A rule names it, and leaves open who receives")
        if number not in receiver.ports:
            return None
        number = receiver.ports[number]
    last = f"-{port.end_port}" if port.end_port is not None else ""
    return f"{protocol} dport {number}{last} "
