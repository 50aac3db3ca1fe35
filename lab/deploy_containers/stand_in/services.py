"""What Services make of the pods that they select: addresses behind a port, and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.deploy_containers.stand_in.manifests import Service
from lab.deploy_containers.stand_in.packet_rules import Balancer, Endpoint


@dataclass(frozen=True)
class Backend:
    """A pod, as Services see it."""

    endpoint: Endpoint
    ready: bool
    """False also when it ends."""


def members(service: Service, backends: Sequence[Backend]) -> list[Endpoint]:
    """Returns the pods whose addresses a Service gives out."""
    return [
        backend.endpoint
        for backend in backends
        if backend.endpoint.namespace == service.metadata.namespace
        and service.spec.selector.items() <= backend.endpoint.labels.items()
        and (backend.ready or service.spec.publish_not_ready_addresses)
    ]


def balancers(services: Sequence[Service], addresses: Mapping[str, str], backends: Sequence[Backend]) -> list[Balancer]:
    """Returns each port of the Services that have an address of their own."""
    found = []
    for service in services:
        if service.spec.headless:
            continue
        pods = members(service, backends)
        for port in service.spec.ports:
            targets = [(pod.address, _target(port.target_port, pod)) for pod in pods]
            found.append(Balancer(addresses[service.metadata.name], port.port, targets))
    return found


def records(
    services: Sequence[Service], addresses: Mapping[str, str], backends: Sequence[Backend]
) -> dict[str, list[str]]:
    """Returns the records of names. A headless Service's name has its pods' addresses, and each of them has a name."""
    found: dict[str, list[str]] = {}
    for service in services:
        name = f"{service.metadata.name}.{service.metadata.namespace}.svc.cluster.local"
        if not service.spec.headless:
            found[name] = [addresses[service.metadata.name]]
            continue
        pods = members(service, backends)
        # Kubernetes knows no name without an address.
        if pods:
            found[name] = [pod.address for pod in pods]
        for pod in pods:
            found[f"{pod.name}.{name}"] = [pod.address]
    return found


def _target(port: str | int, pod: Endpoint) -> int:
    return pod.ports[port] if isinstance(port, str) else port
