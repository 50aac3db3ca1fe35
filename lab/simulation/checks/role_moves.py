"""Watches how a proxy moves nodes between roles: what the decision promises is checked again, from what it has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pdserve.wire.discovery import Role
from pdserve_proxy.registry.snapshot import Reachability, RegisteredNode
from pdserve_proxy.roles import RoleDecider, RoleSwitch, Targets

MOVING = (Role.PREFILL, Role.DECODE)
"""The roles between which nodes move."""


def watched_decider(violated: Callable[[str], None]) -> Callable[[Targets], RoleDecider]:
    """Returns what makes deciders that are watched."""

    def make(targets: Targets) -> RoleDecider:
        return _WatchedDecider(targets, violated)

    return make


class _WatchedDecider(RoleDecider):
    def __init__(self, targets: Targets, violated: Callable[[str], None]) -> None:
        super().__init__(targets)
        self._violated = violated
        self._changed_s = -math.inf
        """When a node was last seen in another role, or told to take one."""
        self._roles: dict[bytes, Role] = {}

    def decide(self, now: float, nodes: Sequence[RegisteredNode]) -> RoleSwitch | None:
        serving = [node.info for node in nodes if node.state is Reachability.SERVING]
        before, self._roles = self._roles, {info.boot_id: info.role for info in serving}
        if any(before.get(boot_id, role) is not role for boot_id, role in self._roles.items()):
            self._changed_s = now
        switch = super().decide(now, nodes)
        if switch is None:
            return None
        held = [info.role for info in serving]
        if switch.node.role not in MOVING or switch.role not in MOVING or switch.role is switch.node.role:
            self._violated(f"a role moves that does not: {switch}")
        if held.count(switch.node.role) < 2:
            self._violated(f"the last node of a role moves: {switch}")
        # A role that has lost its last node gets one at once.
        if switch.role in held and now - self._changed_s < self.targets.rest_s:
            self._violated(f"a role moves {now - self._changed_s:.2f} s after another one: {switch}")
        self._changed_s = now
        return switch
