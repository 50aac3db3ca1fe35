"""Namespaces for pods, and a router between them that no packet gets around.

Each pod has one interface, with an address of its own, and everything it sends goes to the router. Nothing of the
machine's own network is touched: the router is a namespace, too. ``tests/hosts`` has namespaces on one wire instead.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.namespaces import PREFIX, Host, ip, remove, remove_leftovers

PODS, SERVICES = "10.244.0", "10.96.0"
"""The first three bytes of addresses."""
ROUTER = f"{PODS}.1"
"""Where probes come from. It stands for the machine, which no policy keeps out."""
_GATEWAY = "169.254.1.1"


@dataclass
class PodNetwork:
    """Lives as long as ``pod_network``."""

    router: Host
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(2))
    _hosts: dict[str, Host] = field(default_factory=dict)
    _rules: str = ""

    def add(self, name: str) -> Host:
        """Returns a new namespace whose address nobody had before."""
        number = next(self._numbers)
        host = Host(name, f"{self.router.namespace}-{name}", f"{PODS}.{number}")
        port, inner, outer = f"pod{number}", f"02:00:00:01:00:{number:02x}", f"02:00:00:02:00:{number:02x}"
        ip(f"netns add {host.namespace}")
        self._hosts[name] = host
        router = self.router.namespace
        ip(
            f"link add {port} address {outer} type veth peer name eth0 netns {host.namespace} address {inner}",
            f"link set {port} up",
            f"route add {host.address}/32 dev {port} src {ROUTER}",
            f"neigh add {host.address} lladdr {inner} dev {port} nud permanent",
            within=router,
        )
        ip(
            "link set lo up",
            "link set eth0 up",
            f"address add {host.address}/32 dev eth0",
            f"route add {_GATEWAY} dev eth0 scope link",
            f"neigh add {_GATEWAY} lladdr {outer} dev eth0 nud permanent",
            f"route add default via {_GATEWAY} dev eth0",
            within=host.namespace,
        )
        return host

    def remove(self, host: Host) -> None:
        """Removes a namespace, and its interface with it."""
        remove([host.namespace])
        self._hosts.pop(host.name, None)

    def apply(self, rules: str) -> None:
        """Has the router follow ``rules``."""
        if rules == self._rules:
            return
        argv = [*self.router.prefix, "nft", "-f", "-"]
        try:
            subprocess.run(argv, input=rules, text=True, check=True, capture_output=True, timeout=30)
        except subprocess.CalledProcessError as exc:
            raise OSError(f"nft: {exc.stderr.strip()}\n{rules}") from exc
        self._rules = rules

    def close(self) -> None:
        remove([*(host.namespace for host in self._hosts.values()), self.router.namespace])


def socket_on(host: Host, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Returns a socket that belongs to ``host``, whoever uses it."""
    with host.inside():
        return socket.socket(socket.AF_INET, kind)


@contextmanager
def pod_network() -> Iterator[PodNetwork]:
    """Yields a network without pods. At the end of the block, it and all of its namespaces are gone."""
    remove_leftovers()
    router = Host("router", f"{PREFIX}-{os.getpid()}", ROUTER)
    network = PodNetwork(router)
    try:
        ip(f"netns add {router.namespace}")
        ip(
            "link set lo up",
            f"address add {ROUTER}/32 dev lo",
            # Where a Service has no pod, its clients are told at once.
            f"route add unreachable {SERVICES}.0/24",
            within=router.namespace,
        )
        with router.inside():
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        yield network
    finally:
        network.close()
