"""Which ports answer to whom, compared with what the manifests' policies are for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lab.deploy_containers.stand_in.pod_network import socket_on
from tests.hosts.namespaces import Host

CONNECT_S = 1.5
"""A packet that a policy drops is never answered."""
_LISTEN = "0A"
# 127.x.x.x and ::1, each four bytes in the machine's order.
_LOOPBACK = ("7F", "00000000000000000000000001000000")


class Party(Enum):
    """Who connects, and to whom."""

    CLIENT = "client"
    MONITORING = "Prometheus"
    NEIGHBOUR = "neighbour without a label"
    OUTSIDER = "pod of another namespace"
    PROXY = "proxy"
    NODE = "node"


class PortUse(Enum):
    HTTP = "http"
    CONTROL = "control"
    TRANSFER = "transfer"


def may_reach(source: Party, target: Party, use: PortUse) -> bool:
    """Returns what the policies are for, in few words: it is written here once more, and not read from them."""
    match use:
        case PortUse.HTTP if target is Party.PROXY:
            return source in (Party.CLIENT, Party.MONITORING)
        case PortUse.HTTP:
            return source in (Party.PROXY, Party.MONITORING)
        case PortUse.CONTROL | PortUse.TRANSFER:
            return source is Party.NODE


@dataclass(frozen=True)
class Attempt:
    """One connection that is tried."""

    source: Host
    target: Host
    port: int
    allowed: bool

    def __str__(self) -> str:
        return f"{self.source.name} → {self.target.name}:{self.port}"


async def answers(attempt: Attempt) -> bool:
    """Returns whether the connection comes about. A refusal is an answer too: the packet has arrived."""
    with socket_on(attempt.source) as connecting:
        connecting.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(connecting, (attempt.target.address, attempt.port))
        except ConnectionRefusedError:
            return True
        except (TimeoutError, OSError):
            return False
        return True


async def surprises(attempts: Iterable[Attempt]) -> list[str]:
    """Returns each attempt that did not end as it should."""
    listed = list(attempts)
    found = await asyncio.gather(*(answers(each) for each in listed))
    return [
        f"{attempt} {'answers' if answered else 'does not answer'}, and should{' not' if answered else ''}"
        for attempt, answered in zip(listed, found, strict=True)
        if answered != attempt.allowed
    ]


def listening_ports(host: Host) -> set[int]:
    """Returns the TCP ports that anybody beyond the host itself could connect to."""
    with host.inside():
        lines = [line for name in ("tcp", "tcp6") for line in _sockets(Path("/proc/thread-self/net", name))]
    found = set()
    for line in lines:
        address, _, port = line[1].partition(":")
        if line[3] == _LISTEN and not address.endswith(_LOOPBACK):
            found.add(int(port, 16))
    return found


def _sockets(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
