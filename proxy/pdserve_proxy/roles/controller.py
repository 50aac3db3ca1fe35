"""Looks at the nodes again and again, and commands the switches that are decided (``--roles auto``)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from pdserve.config import RolesConfig, TargetsConfig
from pdserve.errors import PdserveError
from pdserve.http.tls import Trust
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH, CommandResult, CommandSigner, SetRole
from pdserve.wire.frame import Secrets
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.roles.decision import RoleDecider, RoleSwitch, Targets
from pdserve_proxy.upstream.node_connection import NodeLost
from pdserve_proxy.upstream.node_pool import NodePool

log = logging.getLogger(__name__)

USUAL_TTFT_MS = 1000.0
USUAL_ITL_MS = 100.0
COMMAND_S = 10.0
"""How long a node may take for a command."""
_MAX_CONNECTIONS = 4
_MAX_ANSWER_BYTES = 64 * 1024


class CommandRefused(PdserveError):
    """A node has not changed its role."""


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
        self._signer = CommandSigner(secrets)
        self._trust = trust
        self._metrics = metrics
        self._clock = clock

    async def run(self) -> None:
        """Runs until it is cancelled."""
        pool = NodePool(connect_timeout_s=COMMAND_S, max_connections=_MAX_CONNECTIONS, trust=self._trust)
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                await self._look(pool)
        finally:
            pool.close()

    async def _look(self, pool: NodePool) -> None:
        switch = self._decider.decide(self._clock(), self._registry.snapshot().nodes)
        self._metrics.show_pressures(self._decider.pressures())
        if switch is None:
            return
        log.info("switching %s", switch)
        try:
            async with asyncio.timeout(COMMAND_S):
                result = await self._command(pool, switch)
        except (PdserveError, NodeLost, TimeoutError) as exc:
            self._decider.failed(switch)
            self._metrics.count_role_switch(switch.role, done=False)
            why = str(exc) or "it has not answered in time"
            log.warning("%s did not become a %s node: %s", switch.node.name, switch.role.value, why)
            return
        self._metrics.count_role_switch(switch.role, done=True)
        log.info("%s is a %s node now, and was a %s node", switch.node.name, result.role.value, result.before.value)

    async def _command(self, pool: NodePool, switch: RoleSwitch) -> CommandResult:
        """Returns what the node says. Raises PdserveError or NodeLost if its role may be the old one."""
        headers = {COMMAND_HEADER: self._signer.sign(SetRole(switch.role), switch.node.boot_id)}
        response = await pool.post(switch.node.url, COMMAND_PATH, headers, b"", silence_s=COMMAND_S)
        try:
            body = b""
            while piece := await response.read():
                body += piece
                if len(body) > _MAX_ANSWER_BYTES:
                    raise CommandRefused(f"its answer is longer than {_MAX_ANSWER_BYTES} bytes")
        finally:
            response.close()
        if response.status != 200:
            raise CommandRefused(f"it answers {response.status}: {body[:500].decode(errors='replace')}")
        try:
            return msgspec.json.decode(body, type=CommandResult)
        except msgspec.MsgspecError as exc:
            raise CommandRefused(f"its answer is none: {exc}") from exc
