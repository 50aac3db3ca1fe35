"""Hosts of one machine: network namespaces that see each other over a ``Wire`` and nothing else.

Needs root, because the kernel does.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.wire import Wire, open_port

_NETWORK = "10.77.0"
_PREFIX = "pdserve"
_CLONE_NEWNET = 0x40000000
_OF_THIS_THREAD = "/proc/thread-self/ns/net"


def _ip(*commands: str, within: str = "") -> None:
    argv = ["ip", *(["-n", within] if within else []), "-batch", "-"]
    try:
        subprocess.run(argv, input="\n".join(commands), text=True, check=True, capture_output=True, timeout=30)
    except subprocess.CalledProcessError as exc:
        raise OSError(f"ip: {exc.stderr.strip()}") from exc


def why_impossible() -> str | None:
    """Why this machine cannot have such hosts; None if it can."""
    if shutil.which("ip") is None:
        return "needs iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"{_PREFIX}-{os.getpid()}-try"
    try:
        _ip(f"netns add {name}")
        try:
            _ip("link add try0 type veth peer name try1", within=name)
        finally:
            _ip(f"netns del {name}")
    except OSError as exc:
        return f"network namespaces with veth cannot be made here: {exc}"
    return None


@dataclass(frozen=True)
class Host:
    """One namespace with one interface."""

    name: str
    namespace: str
    address: str

    @property
    def prefix(self) -> Sequence[str]:
        """Of the command line of a program that is to run there."""
        return "ip", "netns", "exec", self.namespace

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread, and the threads and processes that it starts, have their sockets there."""
        with open(_OF_THIS_THREAD) as home:
            _enter(Path("/run/netns", self.namespace))
            try:
                yield
            finally:
                _enter(Path(f"/proc/self/fd/{home.fileno()}"))


def _enter(namespace: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open() as opened:
        if libc.setns(opened.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


@dataclass(frozen=True)
class Network:
    """Some hosts and what joins them."""

    hosts: Mapping[str, Host]
    wire: Wire


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Hosts of these names, gone at the end of the block with all that still runs in them."""
    _remove_leftovers()
    switch = f"{_PREFIX}-{os.getpid()}"
    hosts = {name: Host(name, f"{switch}-{name}", f"{_NETWORK}.{i}") for i, name in enumerate(names, 1)}
    macs = {name: f"02:00:00:00:00:{i:02x}" for i, name in enumerate(names, 1)}
    try:
        _ip(f"netns add {switch}")
        for i, (name, host) in enumerate(hosts.items(), 1):
            inner, port = host.namespace, f"port{i}"
            _ip(f"netns add {inner}")
            _ip(f"link add {port} type veth peer name eth0 netns {inner} address {macs[name]}", within=switch)
            _ip(
                # One packet a frame, as on a real wire, so that loss takes single packets.
                "link set eth0 gso_max_segs 1",
                f"address add {host.address}/24 dev eth0",
                "link set lo up",
                "link set eth0 up",
                within=inner,
            )
            _ip(f"link set {port} up", within=switch)
            with host.inside():
                # Of those that every kernel has, and unlike BBR not misled by a delay that a test has changed.
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
        with Host("switch", switch, "").inside():
            ports = [open_port(name, macs[name], f"port{i}") for i, name in enumerate(names, 1)]
        wire = Wire(ports)
        try:
            yield Network(hosts, wire)
        finally:
            wire.close()
    finally:
        _remove([switch, *(host.namespace for host in hosts.values())])


def _remove_leftovers() -> None:
    """Of test runs that were killed."""
    _remove(
        [
            path.name
            for path in Path("/run/netns").glob(f"{_PREFIX}-*")
            if not Path("/proc", path.name.split("-")[1]).exists()
        ]
    )


def _remove(namespaces: Sequence[str]) -> None:
    for namespace in namespaces:
        if Path("/run/netns", namespace).exists():
            _ip(f"netns del {namespace}")
