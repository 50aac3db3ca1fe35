"""Looks at the nodes again and again, and commands the switches that are decided (``--roles auto``)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pdserve.config import RolesConfig, TargetsConfig
from pdserve.control.frame import Secrets
from pdserve.http.tls import Trust
from pdserve.wire.command import SetRole
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.roles.decision import RoleDecider, Targets
from pdserve_proxy.upstream.node_command import CommandRefused, NodeCommander

log = logging.getLogger(__name__)

USUAL_TTFT_MS = 1000.0
USUAL_ITL_MS = 100.0


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
