"""The nodes at one moment, immutable.

``Serving`` is what requests are routed by. It is made anew when a node comes or goes, or changes its role or state, and
not at every heartbeat: heartbeats grow with the nodes, and so would the cost of each request. ``Snapshot`` has all that
is known of every node, for those who look at the whole cluster now and then.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from pdserve.wire.discovery import NodeInfo, NodeLoad, Role


class Reachability(enum.Enum):
    SERVING = "serving"
    UNREACHABLE = "unreachable"
    """The node refused a connection, and gets no requests until its next heartbeat, or longer if it did so before."""
    DRAINING = "draining"
    """The node takes no new work, and the streams that it has move to other nodes."""


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """A registered node with what is known of it now."""

    info: NodeInfo
    load: NodeLoad
    state: Reachability
    seen_s: float
    """When its last message came, on the registry's clock."""
    proxies: int = 1
    """How many proxies know the node, by its last heartbeat."""
    met: bool = False
    """Whether it has once connected to nodes that this or another proxy has named, or has tried for long enough."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A node that can decode now, with the nodes that can compute its prompts."""

    decode: NodeInfo
    fitting: tuple[NodeInfo, ...]
    """Every node that computes prompts of the same model, also a mixed ``decode`` itself: all share one tuple."""

    @property
    def prefill(self) -> tuple[NodeInfo, ...]:
        """The other nodes that can compute prompts for ``decode``; none if it computes them by itself."""
        if self.decode.role is Role.MIXED:
            return tuple([node for node in self.fitting if node is not self.decode])
        return self.fitting


@dataclass(frozen=True, slots=True)
class Serving:
    """The nodes that requests can go to, in order of registration."""

    models: Mapping[str, None]
    """Every model of a registered node, whether or not it can be served now."""
    pairings: Mapping[str, tuple[Pairing, ...]]
    """The pairings of each model that can be served now."""
    decode_nodes: Mapping[str, frozenset[bytes]]
    """The boot ids of the nodes of these pairings."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The registry's content at one moment, in order of registration."""

    nodes: tuple[RegisteredNode, ...]
    models: tuple[str, ...]
    """Every model of a registered node, whether or not it can be served now."""
    pairings: Mapping[str, tuple[Pairing, ...]]
    """The pairings of each model that can be served now."""
    loads: Mapping[bytes, NodeLoad]
    """The load in each node's last heartbeat, by boot id."""
    live_proxies: int = 1
    """How many proxies the cluster has now, as far as its nodes know."""

    @property
    def ready_models(self) -> list[str]:
        """The models that can be served without a wait for a first connection between two nodes."""
        met = {node.info.boot_id for node in self.nodes if node.met}

        def connected(pairing: Pairing) -> bool:
            decode, partners = pairing.decode, pairing.prefill
            if not partners:
                return True
            # Nobody fetches from a node without a control address.
            return decode.boot_id in met and (not decode.control or any(node.boot_id in met for node in partners))

        return [model for model, pairings in self.pairings.items() if any(map(connected, pairings))]


class RegistryView(Protocol):
    """The registry itself, or its copy in another process, as those who route requests see it."""

    def snapshot(self) -> Snapshot:
        """Returns all that is known of every node now. It looks at every node that there is: not for each request."""

    def serving(self) -> Serving:
        """Returns the nodes that requests can go to now: the same object as long as nothing has changed in it."""

    def load(self, boot_id: bytes) -> NodeLoad | None:
        """Returns the load in a node's last heartbeat; None if the node is not registered."""

    @property
    def live_proxies(self) -> int:
        """How many proxies the cluster has now, as far as its nodes know."""

    def mark_unreachable(self, boot_id: bytes) -> None:
        """Leaves a node that refused a connection out of routes until its next heartbeat.

        A node that refuses again soon after that is left out for 2 heartbeats, then for 4, and at most for 8.
        """

    def on_loss(self, callback: Callable[[NodeInfo], None]) -> None:
        """From now on calls ``callback`` with every node that is dropped because it fell silent and may be dead.

        A node that deregisters is not lost, since what runs there goes on. A lost node may come back.
        """

    def on_change(self, callback: Callable[[], object]) -> None:
        """From now on calls ``callback`` too, whenever ``serving`` has changed or a node that drains was heard.

        Of what changes together, such as the loss of many nodes, it tells once.
        """

    def on_node(self, callback: Callable[[bytes], object]) -> None:
        """From now on calls ``callback`` too with the boot id of each node that comes, goes, changes or is heard."""

    @property
    def draining(self) -> frozenset[bytes]:
        """The boot ids of the nodes that drain."""


class RegistryWatcher(Protocol):
    """An object that a registry calls when something happens to a node."""

    def heard_from(self, boot_id: bytes, load: NodeLoad) -> None:
        """Notes a node's load, which has come in a heartbeat."""

    def forget(self, boot_id: bytes) -> None:
        """Notes that the node is gone."""


def take_snapshot(nodes: Iterable[RegisteredNode], serving: Serving | None = None, live_proxies: int = 1) -> Snapshot:
    """Returns a snapshot of ``nodes``. ``serving`` is what ``take_serving`` returns for the same nodes."""
    everyone = tuple(nodes)
    serving = serving or take_serving(everyone)
    loads = MappingProxyType({node.info.boot_id: node.load for node in everyone})
    return Snapshot(everyone, tuple(serving.models), serving.pairings, loads, live_proxies)


def take_serving(nodes: Iterable[RegisteredNode], prefilled: Container[str] = frozenset()) -> Serving:
    """Returns those of ``nodes`` that requests can go to.

    ``prefilled`` are the fingerprints that have had a node that prefills: their decode nodes serve without it, too. A
    decode node can compute a prompt by itself. While a cluster comes up it is not asked to, but when the last node that
    prefills is lost, slower answers are better than none.
    """
    serving: dict[str, list[NodeInfo]] = {}
    for node in nodes:
        of_model = serving.setdefault(node.info.model, [])
        if node.state is Reachability.SERVING:
            of_model.append(node.info)
    paired = {model: _pair(infos, prefilled) for model, infos in serving.items()}
    pairings = {model: pairs for model, pairs in paired.items() if pairs}
    decode_nodes = {model: frozenset(pair.decode.boot_id for pair in pairs) for model, pairs in pairings.items()}
    return Serving(MappingProxyType(dict.fromkeys(serving)), MappingProxyType(pairings), MappingProxyType(decode_nodes))


def takes_prompts(info: NodeInfo) -> bool:
    """Returns whether other nodes can have their prompts computed by this one."""
    return info.role.prefills and bool(info.control)


def unpaired_roles(snapshot: Snapshot) -> Counter[Role]:
    """Returns how many decode nodes fit no node that prefills, and how many prefill nodes fit none that answers.

    A mixed node needs nobody.
    """
    infos = [node.info for node in snapshot.nodes]
    prefill = {(info.model, info.fingerprint) for info in infos if takes_prompts(info)}
    answer = {(info.model, info.fingerprint) for info in infos if info.role is not Role.PREFILL}
    partners = {Role.DECODE: prefill, Role.PREFILL: answer}
    return Counter(
        info.role
        for info in infos
        if info.role in partners and (info.model, info.fingerprint) not in partners[info.role]
    )


def _pair(infos: list[NodeInfo], prefilled: Container[str]) -> tuple[Pairing, ...]:
    by_fingerprint: dict[str, list[NodeInfo]] = {}
    for info in infos:
        if takes_prompts(info):
            by_fingerprint.setdefault(info.fingerprint, []).append(info)
    prefill = {fingerprint: tuple(fitting) for fingerprint, fitting in by_fingerprint.items()}
    pairings = []
    for info in infos:
        fitting = prefill.get(info.fingerprint, ())
        if info.role is Role.MIXED:
            # A mixed node without a control address is of a version whose mixed nodes fetch nothing.
            pairings.append(Pairing(info, fitting if info.control else ()))
        elif info.role is Role.DECODE and (fitting or info.fingerprint in prefilled):
            pairings.append(Pairing(info, fitting))
    return tuple(pairings)
