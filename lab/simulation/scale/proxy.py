"""A proxy as far as it knows and chooses nodes: its real registry, router, policies and counts of attempts.

Heartbeats are encoded and decoded as on the wire. The proxy loses streams with their nodes, and lets so many go on at a
time as ``--max-resumes`` says. What its decisions and heartbeats really take is measured, and changes nothing in the
simulation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import cast

import msgspec

from lab.simulation.scale.events import Events
from lab.simulation.scale.nodes import MODEL
from pdserve.config import RegistryConfig, RelayConfig, RoutingPolicy
from pdserve.wire.discovery import NodeHeartbeat, NodeInfo, Register, ToProxy
from pdserve_proxy.continuation.turns import ResumeLimit
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.routing.attempts import Attempt, Attempts
from pdserve_proxy.routing.router import Route, RouteQuery, Router

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(cast("type[ToProxy]", ToProxy))


@dataclass
class RealCosts:
    """CPU time that the product's code took on this machine."""

    decisions: int = 0
    decisions_s: float = 0.0
    heartbeats: int = 0
    heartbeats_s: float = 0.0


class CoarseProxy:
    """One proxy of the cluster."""

    def __init__(
        self, events: Events, policy: RoutingPolicy, chance: Random | None, relay: RelayConfig, costs: RealCosts
    ) -> None:
        config = RegistryConfig()
        self._events = events
        self.attempts = Attempts()
        self.registry = Registry(config.heartbeat_ms / 1000, config.missed_heartbeats, watcher=self.attempts)
        self._router = Router(policy, self.attempts, chance)
        self._costs = costs
        self._connect_timeout_s = relay.connect_timeout_s
        self._limit = ResumeLimit(relay.max_resumes, self.registry, processes=1)
        self._resuming = 0
        self._lost: deque[Callable[[], object]] = deque()
        self._at: dict[bytes, dict[object, Callable[[], object]]] = {}
        """What has to be told when a node is lost, by the node and by whom it is told."""
        self.registry.on_loss(self._node_lost)
        self.registry.on_change(self._give_turns)

    def register(self, node: NodeInfo) -> None:
        self.registry.handle(Register(node), self._events.now)

    def hear(self, heartbeat: NodeHeartbeat) -> None:
        began = time.thread_time()
        message = _decoder.decode(_encoder.encode(heartbeat))
        assert isinstance(message, NodeHeartbeat)
        self.registry.handle(message, self._events.now)
        self.registry.expire(self._events.now)
        self._costs.heartbeats_s += time.thread_time() - began
        self._costs.heartbeats += 1

    def choose(self, prompt_start: bytes) -> tuple[Route, Attempt]:
        began = time.thread_time()
        route = self._router.choose(self.registry.serving(), RouteQuery(MODEL, prompt_start))
        attempt = self.attempts.begin((route.decode, 1), *[(node, 1) for node in route.prefill[:1]])
        self._costs.decisions_s += time.thread_time() - began
        self._costs.decisions += 1
        return route, attempt

    def watch(self, node: NodeInfo, who: object, lost: Callable[[], object]) -> None:
        """From now on calls ``lost`` when the node is lost, until ``unwatch`` is called."""
        self._at.setdefault(node.boot_id, {})[who] = lost

    def unwatch(self, node: NodeInfo, who: object) -> None:
        self._at.get(node.boot_id, {}).pop(who, None)

    def unreachable(self, node: NodeInfo, retry: Callable[[], object]) -> None:
        """A node that is dead takes no connection, which is noticed after a while, or when it is lost: then ``retry``.

        A second call of ``retry`` has to do nothing.
        """

        def noticed() -> None:
            self.registry.mark_unreachable(node.boot_id)
            retry()

        self.watch(node, retry, retry)
        self._events.after(self._connect_timeout_s, noticed)

    def take_turn(self, resume: Callable[[], object]) -> None:
        """Calls ``resume`` when it is its turn. The caller calls ``end_turn`` when the stream goes on."""
        self._lost.append(resume)
        self._give_turns()

    def end_turn(self) -> None:
        self._resuming -= 1
        self._give_turns()

    @property
    def waiting(self) -> int:
        """The streams that wait for their turn."""
        return len(self._lost)

    def _give_turns(self) -> None:
        most = self._limit.now() if self._lost else 0
        while self._lost and self._resuming < most:
            self._resuming += 1
            self._events.after(0.0, self._lost.popleft())

    def _node_lost(self, node: NodeInfo) -> None:
        for lost in self._at.pop(node.boot_id, {}).values():
            self._events.after(0.0, lost)  # when all nodes that are lost now are dropped
