"""Who is there at one moment: immutable, so that a policy can index what it has just counted."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from pdserve.wire.discovery import NodeInfo, NodeLoad, Role


class Reachability(enum.Enum):
    SERVING = "serving"
    UNREACHABLE = "unreachable"
    """It refused a connection; left out of routes until its next heartbeat."""


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """One registered node."""

    info: NodeInfo
    load: NodeLoad
    state: Reachability
    seen_s: float
    """When its last message came, on the registry's clock."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A node that can decode now, with every prefill node that fits it (none where it prefills by itself)."""

    decode: NodeInfo
    prefill: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The registry's content at one moment, in order of registration."""

    nodes: tuple[RegisteredNode, ...]
    models: tuple[str, ...]
    """Every model that some node was started for, whether or not it can be served now."""
    pairings: Mapping[str, tuple[Pairing, ...]]
    """By model. A model that cannot be served now is not in it."""
    loads: Mapping[bytes, NodeLoad]
    """By boot id, as of each node's last heartbeat."""


class RegistryView(Protocol):
    """Who knows the nodes: the registry itself, or a copy of it in another process."""

    def snapshot(self) -> Snapshot:
        """As of now."""

    def mark_unreachable(self, boot_id: bytes) -> None:
        """Leave a node that refused a connection out of routes until its next heartbeat."""

    def on_loss(self, callback: Callable[[NodeInfo], None]) -> None:
        """From now on calls ``callback`` with every node that is dropped because it fell silent and may be dead.

        A node that deregisters is not lost, since what runs there goes on. A lost node may come back.
        """


class RegistryWatcher(Protocol):
    """Is told what happens in a registry."""

    def heard_from(self, boot_id: bytes) -> None:
        """The node's load was renewed."""

    def forget(self, boot_id: bytes) -> None:
        """The node is gone."""


def take_snapshot(nodes: Iterable[RegisteredNode], prefilled: frozenset[str] = frozenset()) -> Snapshot:
    """``prefilled`` are the fingerprints that have had a prefill node: their decode nodes serve without one too.

    A decode node can compute a prompt by itself. While a cluster comes up it is not asked to, but when the last prefill
    node is lost, slower answers are better than none.
    """
    everyone = tuple(nodes)
    serving: dict[str, list[NodeInfo]] = {node.info.model: [] for node in everyone}
    for node in everyone:
        if node.state is Reachability.SERVING:
            serving[node.info.model].append(node.info)
    pairings = {model: _pair(infos, prefilled) for model, infos in serving.items()}
    return Snapshot(
        everyone,
        tuple(serving),
        MappingProxyType({model: pairs for model, pairs in pairings.items() if pairs}),
        MappingProxyType({node.info.boot_id: node.load for node in everyone}),
    )


def _pair(infos: list[NodeInfo], prefilled: frozenset[str]) -> tuple[Pairing, ...]:
    by_fingerprint: dict[str, list[NodeInfo]] = {}
    for info in infos:
        if info.role is Role.PREFILL:
            by_fingerprint.setdefault(info.fingerprint, []).append(info)
    prefill = {fingerprint: tuple(fitting) for fingerprint, fitting in by_fingerprint.items()}
    pairings = []
    for info in infos:
        if info.role is Role.MIXED:
            pairings.append(Pairing(info, ()))
        elif info.role is Role.DECODE:
            fitting = prefill.get(info.fingerprint, ())
            if fitting or info.fingerprint in prefilled:
                pairings.append(Pairing(info, fitting))
    return tuple(pairings)
