"""Moves nodes between prefilling and decoding (``--roles auto``).

``RoleDecider`` decides which node changes its role, from the loads in the nodes' heartbeats, and does no I/O.
``RoleController`` looks at the nodes again and again, and commands what is decided.

Nodes that can be paired are one *group*: they have the same model and fingerprint. A group has two pressures, each the
share of its target that is used up:

* ``prompts``: how long a prompt waits for its computation, of the target for the first token. It is the mean of the
  prefill nodes, or that of the decode nodes which have free places, if prompts queue there.
* ``answers``: how long a decode step takes, of the target for the time between tokens, as the mean of the decode nodes.
  Where all their places or nearly all their KV blocks are taken, it is also how long requests wait for them, of the
  target for the first token.

When one of the two has been late for several looks in a row, and the other has capacity in all of them and would not be
late with one node less, a node moves to where it is late. Then the group rests, until the move can show in what nodes
measure. It also rests after another proxy or an operator has changed a role. The last node of a role stays. If all
nodes of a role are gone, the other role gives it one at once, unless there is a mixed node, which has both roles. Mixed
nodes keep theirs, and do not count otherwise. If both pressures are late, no move helps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pdserve.config import RolesConfig, TargetsConfig
from pdserve.control.frame import Secrets
from pdserve.http.tls import Trust
from pdserve.wire.command import SetRole
from pdserve.wire.discovery import NodeInfo, Role, free_share
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.snapshot import Reachability, RegisteredNode, RegistryView
from pdserve_proxy.upstream.node_command import CommandRefused, NodeCommander

LATE = 0.9
"""Nodes are added to a role from this pressure on, shortly before its target is missed."""
SPARE = 0.6
"""A role gives nodes away up to this pressure."""
SCARCE = 0.1
"""A decode node in which requests wait is full if this share of its KV blocks is free in any cache group, or less."""
_OLD_SHARE = 0.5
"""The share of a pressure that earlier looks make."""

GroupKey: TypeAlias = tuple[str, str]
"""Model and fingerprint."""

log = logging.getLogger(__name__)

USUAL_TTFT_MS = 1000.0
USUAL_ITL_MS = 100.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What the controller aims at, and how fast it acts."""

    ttft_s: float
    itl_s: float
    looks: int
    """The looks in a row that have to agree."""
    rest_s: float
    """The time after a move in which the group's nodes keep their roles."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """The pressures of one group: 1 means that the target is just met."""

    prompts: float
    answers: float

    def wanted_role(self, prefill: int, decode: int) -> Role | None:
        """Returns the role that needs one more node and can get it from so many; None if there is none."""
        if self.prompts >= LATE and _can_give(self.answers, decode):
            return Role.PREFILL
        if self.answers >= LATE and _can_give(self.prompts, prefill):
            return Role.DECODE
        return None


def _can_give(pressure: float, nodes: int) -> bool:
    """Returns whether these nodes have capacity, and one less would not be late: its work goes to the others."""
    return nodes > 1 and pressure <= SPARE and pressure * nodes / (nodes - 1) < LATE


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """A decision, with what it was made from."""

    node: NodeInfo
    role: Role
    pressure: Pressure
    prefill: int
    """The number of prefill nodes before the switch."""
    decode: int

    def __str__(self) -> str:
        return (
            f"{self.node.name} ({self.node.url}) from {self.node.role.value} to {self.role.value}: of their targets, "
            f"prompts use {self.pressure.prompts:.2f} on {self.prefill} prefill nodes and answers "
            f"{self.pressure.answers:.2f} on {self.decode} decode nodes"
        )


@dataclass(slots=True)
class _Group:
    """What is remembered of one group."""

    pressure: Pressure | None = None
    wanted: Role | None = None
    looks: int = 0
    """The looks in a row in which ``wanted`` was wanted."""
    rests_until_s: float = 0.0
    restores_from_s: float = 0.0
    """When a role with no node left may get one: at once, but not twice for one loss."""
    roles: dict[bytes, Role] = field(default_factory=dict)
    """The role of each node at the last look, by its boot id."""
    had_both: bool = False
    """Whether the group has had nodes of both roles."""

    def note_roles(self, members: Sequence[RegisteredNode]) -> bool:
        """Returns whether a node has another role than at the last look."""
        before, self.roles = self.roles, {node.info.boot_id: node.info.role for node in members}
        self.had_both |= {Role.PREFILL, Role.DECODE} <= set(self.roles.values())
        return any(before.get(boot_id, role) is not role for boot_id, role in self.roles.items())


@dataclass(slots=True)
class RoleDecider:
    """Decides for all groups of one proxy. Times are seconds on one clock."""

    targets: Targets
    _groups: dict[GroupKey, _Group] = field(default_factory=dict)
    _unfit: frozenset[bytes] = frozenset()
    """The boot ids of nodes that have not taken a command."""

    def decide(self, now: float, nodes: Sequence[RegisteredNode]) -> RoleSwitch | None:
        """Takes one look at all nodes, and returns the switch that is to be made now, if there is one."""
        members: dict[GroupKey, list[RegisteredNode]] = {}
        for node in nodes:
            if node.state is Reachability.SERVING:
                members.setdefault((node.info.model, node.info.fingerprint), []).append(node)
        self._groups = {key: self._groups.get(key) or _Group() for key in members}
        self._unfit &= {node.info.boot_id for node in nodes}
        # Every group is looked at, also when an earlier one has a switch.
        found = [self._look(now, self._groups[key], of_group) for key, of_group in members.items()]
        switch = next((each for each in found if each is not None), None)
        if switch is not None:
            group = self._groups[switch.node.model, switch.node.fingerprint]
            group.rests_until_s, group.looks, group.pressure = now + self.targets.rest_s, 0, None
            if not (switch.prefill and switch.decode):
                group.restores_from_s = group.rests_until_s
        return switch

    def failed(self, switch: RoleSwitch) -> None:
        """Notes that the node has not taken the command: this start of it is left alone from now on."""
        self._unfit |= {switch.node.boot_id}
        group = self._groups.get((switch.node.model, switch.node.fingerprint))
        if group is not None:
            group.restores_from_s = 0.0

    def pressures(self) -> dict[GroupKey, Pressure]:
        """Returns the pressures at the last look, of groups that have both roles and do not rest."""
        return {key: group.pressure for key, group in self._groups.items() if group.pressure is not None}

    def _look(self, now: float, group: _Group, members: Sequence[RegisteredNode]) -> RoleSwitch | None:
        prefill = [node for node in members if node.info.role is Role.PREFILL]
        decode = [node for node in members if node.info.role is Role.DECODE]
        if group.note_roles(members):
            group.rests_until_s = now + self.targets.rest_s
        if now < group.rests_until_s or not (prefill and decode):
            group.looks, group.pressure = 0, None
            if not group.had_both or now < group.restores_from_s or len(members) > len(prefill) + len(decode):
                return None
            return self._restore(prefill, decode)
        group.pressure = _smoothed(group.pressure, pressure_of(prefill, decode, self.targets))
        wanted = group.pressure.wanted_role(len(prefill), len(decode))
        group.looks = group.looks + 1 if wanted is group.wanted else 1
        group.wanted = wanted
        if wanted is None or group.looks < self.targets.looks:
            return None
        return self._switch(wanted, group.pressure, prefill, decode)

    def _restore(self, prefill: Sequence[RegisteredNode], decode: Sequence[RegisteredNode]) -> RoleSwitch | None:
        """Returns the switch that gives a role with no node left one of the other role's, if that has two.

        All proxies choose the same node, whatever each of them knows of the loads: so those that act at once move one.
        """
        fit = [node.info for node in (*prefill, *decode) if self._can_switch(node.info)]
        if (prefill and decode) or max(len(prefill), len(decode)) < 2 or not fit:
            return None
        chosen = min(fit, key=lambda info: info.boot_id)
        lost = Role.DECODE if prefill else Role.PREFILL
        return RoleSwitch(chosen, lost, pressure_of(prefill, decode, self.targets), len(prefill), len(decode))

    def _switch(
        self, wanted: Role, pressure: Pressure, prefill: Sequence[RegisteredNode], decode: Sequence[RegisteredNode]
    ) -> RoleSwitch | None:
        """Returns the switch of the least busy node to ``wanted``, or None if no node can be commanded."""
        giving = decode if wanted is Role.PREFILL else prefill
        fit = [node for node in giving if self._can_switch(node.info)]
        if not fit:
            return None
        least = min(fit, key=lambda node: (node.load.queue_s, node.load.running + node.load.waiting))
        return RoleSwitch(least.info, wanted, pressure, len(prefill), len(decode))

    def _can_switch(self, info: NodeInfo) -> bool:
        return bool(info.control) and info.boot_id not in self._unfit


def pressure_of(prefill: Sequence[RegisteredNode], decode: Sequence[RegisteredNode], targets: Targets) -> Pressure:
    """Returns the pressures of one group as its nodes' last heartbeats have them."""
    full = [node for node in decode if _is_full(node)]
    spare = [node for node in decode if node not in full]
    places_s = _mean([node.load.queue_s for node in full]) if not spare else 0.0
    return Pressure(
        prompts=max(_mean([node.load.queue_s for node in prefill]), _mean([node.load.queue_s for node in spare]))
        / targets.ttft_s,
        answers=max(_mean([node.load.step_s for node in decode]) / targets.itl_s, places_s / targets.ttft_s),
    )


def _is_full(node: RegisteredNode) -> bool:
    """Returns whether a node has no place, or hardly a KV block, for one more answer."""
    load, capacity = node.load, node.info.capacity
    out_of_blocks = load.waiting > 0 and free_share(capacity, load) < SCARCE
    return out_of_blocks or load.running >= capacity.max_running


def _smoothed(before: Pressure | None, now: Pressure) -> Pressure:
    if before is None:
        return now
    return Pressure(
        _OLD_SHARE * before.prompts + (1 - _OLD_SHARE) * now.prompts,
        _OLD_SHARE * before.answers + (1 - _OLD_SHARE) * now.answers,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def targets_of(config: RolesConfig, latency: TargetsConfig) -> Targets:
    """Returns what the controller aims at: the operator's targets, or else usual ones."""
    ttft_ms, itl_ms = latency.target_ttft_ms or USUAL_TTFT_MS, latency.target_itl_ms or USUAL_ITL_MS
    return Targets(ttft_ms / 1000, itl_ms / 1000, config.looks, config.rest_s)


class RoleController:
    """Moves nodes between roles while ``run`` runs."""

    def __init__(
        self,
        config: RolesConfig,
        targets: TargetsConfig,
        registry: RegistryView,
        secrets: Secrets,
        trust: Trust,
        metrics: ProxyMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = config.interval_ms / 1000
        self._decider = RoleDecider(targets_of(config, targets))
        self._registry = registry
        self._secrets = secrets
        self._trust = trust
        self._metrics = metrics
        self._clock = clock

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with NodeCommander(self._secrets, self._trust) as commander:
            while True:
                await asyncio.sleep(self._interval_s)
                await self._look(commander)

    async def _look(self, commander: NodeCommander) -> None:
        switch = self._decider.decide(self._clock(), self._registry.snapshot().nodes)
        self._metrics.show_pressures(self._decider.pressures())
        if switch is None:
            return
        log.info("switching %s", switch)
        try:
            result = await commander.send(SetRole(switch.role), switch.node)
        except CommandRefused as exc:
            self._decider.failed(switch)
            self._metrics.count_role_switch(switch.role, done=False)
            log.warning("%s did not become a %s node: %s", switch.node.name, switch.role.value, exc)
            return
        self._metrics.count_role_switch(switch.role, done=True)
        log.info("%s is a %s node now, and was a %s node", switch.node.name, result.role.value, result.before.value)
