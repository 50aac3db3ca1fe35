"""What ``pdserve up`` starts: which nodes, on which cores, with which command lines. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.child import command
from pdserve.config import ClusterConfig, LogConfig, LogLevel, NodeConfig, UpConfig
from pdserve.cores import partition
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE = "lo"
"""UCX would listen on every network device, and it believes whoever connects."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node process."""

    name: str
    role: Role
    cores: tuple[int, ...]


def plan_nodes(cluster: ClusterConfig, cores: Sequence[int]) -> list[NodePlan]:
    """The nodes of ``cluster``, prefill nodes first, with ``cores`` divided between them."""
    counts = {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode, Role.MIXED: cluster.mixed}
    named = [(role, f"{role.value}-{index}") for role, count in counts.items() for index in range(count)]
    return [NodePlan(name, role, own) for (role, name), own in zip(named, partition(cores, len(named)), strict=True)]


def proxy_command(config: UpConfig) -> list[str]:
    port = str(config.http.port)
    return command("proxy", "--host", config.http.host, "--port", port, "--control-port", "0")


def node_command(node: NodePlan, control: str) -> list[str]:
    cores = ",".join(str(core) for core in node.cores)
    return command(node.role.value, "--name", node.name, "--proxy", control, "--cores", cores, "--port", "0")


def child_environ(config: UpConfig, environ: Mapping[str, str], secret: str, file: str) -> dict[str, str]:
    """What every child is given: the settings of ``config``, and of ``environ`` those that ``up`` itself has not.

    Addresses are loopback and ports free ones whatever the environment says; the proxy's flags say where clients come.
    """
    inner = dataclasses.replace(config.http, host=LOOPBACK, port=0, advertise="")
    # The line with a process's addresses is an INFO line; the console hides what the user does not want to see.
    log = LogConfig(LogLevel.DEBUG if config.log.level is LogLevel.DEBUG else LogLevel.INFO)
    settings = to_environ(dataclasses.replace(config, http=inner, log=log))
    defaults = to_environ(NodeConfig())
    private = {name: defaults[name] for name in _OWN_ADDRESSES}
    private["PDSERVE_CONTROL_HOST"] = LOOPBACK
    private["PDSERVE_UCX_NET_DEVICES"] = LOOPBACK_DEVICE
    own = {**settings, **private, "PDSERVE_SECRET": secret, "PDSERVE_SECRET_FILE": ""}
    if file:
        own["PDSERVE_CONFIG"] = file
    return {**environ, **own}


_OWN_ADDRESSES = ("PDSERVE_TRANSFER_HOST", "PDSERVE_TRANSFER_PORT", "PDSERVE_TRANSFER_ADVERTISE")
