"""Several hosts on one machine: network namespaces that reach each other only over a ``Wire``.

They need root, because the kernel does.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.eventually import eventually
from tests.hosts.wire import Wire, open_port

_NETWORK = "10.77.0"
PREFIX = "pdserve"
_CLONE_NEWNET = 0x40000000
_OF_THIS_THREAD = "/proc/thread-self/ns/net"


def ip(*commands: str, within: str = "") -> None:
    """Runs commands of iproute2 together, in a namespace if one is given."""
    argv = ["ip", *(["-n", within] if within else []), "-batch", "-"]
    try:
        subprocess.run(argv, input="\n".join(commands), text=True, check=True, capture_output=True, timeout=30)
    except subprocess.CalledProcessError as exc:
        raise OSError(f"ip: {exc.stderr.strip()}") from exc


def why_impossible() -> str | None:
    """Returns why this machine cannot have such hosts, or None if it can."""
    if shutil.which("ip") is None:
        return "needs iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        ip(f"netns add {name}")
        try:
            ip("link add try0 type veth peer name try1", within=name)
        finally:
            ip(f"netns del {name}")
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
        """Returns the beginning of the command line of a program that is to run on this host."""
        return "ip", "netns", "exec", self.namespace

    @property
    def received_bytes(self) -> int:
        """The bytes that the kernel has received on this host's interface."""
        with self.inside():
            shown = Path("/proc/thread-self/net/dev").read_text()
        return next(
            int(line.split(":")[1].split()[0]) for line in shown.splitlines() if line.strip().startswith("eth0:")
        )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """During the block, this thread, and the threads and processes that it starts, have their sockets here."""
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
    """Some hosts and the wire between them."""

    hosts: Mapping[str, Host]
    wire: Wire


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Yields hosts with these names. At the end of the block they end, with all that still runs on them."""
    remove_leftovers()
    switch = f"{PREFIX}-{os.getpid()}"
    hosts = {name: Host(name, f"{switch}-{name}", f"{_NETWORK}.{i}") for i, name in enumerate(names, 1)}
    macs = {name: f"02:00:00:00:00:{i:02x}" for i, name in enumerate(names, 1)}
    try:
        ip(f"netns add {switch}")
        with Host("switch", switch, "").inside():
            # The kernel would send hosts IPv6 messages of its own, past the wire.
            for interfaces in ("all", "default"):
                with suppress(FileNotFoundError):
                    Path(f"/proc/sys/net/ipv6/conf/{interfaces}/disable_ipv6").write_text("1")
        for i, (name, host) in enumerate(hosts.items(), 1):
            inner, port = host.namespace, f"port{i}"
            ip(f"netns add {inner}")
            ip(f"link add {port} type veth peer name eth0 netns {inner} address {macs[name]}", within=switch)
            ip(
                # Each frame has one packet, as on a real wire, so that a loss takes single packets.
                "link set eth0 gso_max_segs 1",
                f"address add {host.address}/24 dev eth0",
                "link set lo up",
                "link set eth0 up",
                within=inner,
            )
            ip(f"link set {port} up", within=switch)
            with host.inside():
                # Every kernel has reno, and a delay that a test changes does not mislead it, as it would mislead BBR.
                Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
        with Host("switch", switch, "").inside():
            ports = [open_port(name, macs[name], f"port{i}") for i, name in enumerate(names, 1)]
        wire = Wire(ports)
        try:
            yield Network(hosts, wire)
        finally:
            wire.close()
    finally:
        remove([switch, *(host.namespace for host in hosts.values())])


@contextmanager
def joined_twice() -> Iterator[tuple[Host, Host]]:
    """Yields two hosts with two networks between them, one of each interface, ``eth0`` and ``eth1``."""
    remove_leftovers()
    one, other = (Host(name, f"{PREFIX}-{os.getpid()}-twice-{name}", "") for name in ("one", "other"))
    try:
        for host in (one, other):
            ip(f"netns add {host.namespace}")
        for i in range(2):
            peer = f"peer name eth{i} netns {other.namespace}"
            ip(f"link add eth{i} type veth {peer}", within=one.namespace)
            for number, host in enumerate((one, other), 1):
                address = f"10.78.{i}.{number}/24"
                ip(f"address add {address} dev eth{i}", f"link set eth{i} up", within=host.namespace)
        for host in (one, other):
            eventually(partial(_are_up, host), f"both devices of {host.name} are up")
        yield one, other
    finally:
        remove([one.namespace, other.namespace])


def _are_up(host: Host) -> bool:
    # The kernel lets a new link carry something a moment after both of its ends are up.
    argv = ["ip", "-n", host.namespace, "-brief", "link", "show", "type", "veth"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    return len(shown) == 2 and all(line.split()[1] == "UP" for line in shown)


def remove_leftovers() -> None:
    """Removes the namespaces of test runs that were killed."""
    remove(
        [
            path.name
            for path in Path("/run/netns").glob(f"{PREFIX}-*")
            if not Path("/proc", path.name.split("-")[1]).exists()
        ]
    )


def remove(namespaces: Sequence[str]) -> None:
    for namespace in namespaces:
        if Path("/run/netns", namespace).exists():
            ip(f"netns del {namespace}")
