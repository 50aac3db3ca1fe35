"""Checks the addresses of this machine's own control channel, and the route to each peer."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pdserve.config import TransferConfig
from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning
from pdserve.settings import is_loopback
from pdserve_kvtransfer.control.sockets import advertised_host

_SIOCGIFADDR = 0x8915
_IP_MTU = 14
_IPV6_MTU = 24
_JUMBO = 8000


@dataclass(frozen=True, slots=True)
class ListenFacts:
    """Whether a prefill node with these settings could be reached."""

    host: str
    port: int
    bind_error: str
    """Why the address cannot be bound; empty if it can be."""
    in_use: bool
    advertise: str
    addresses: tuple[str, ...]
    """The addresses that the advertised name resolves to on this machine; empty if it does not resolve."""
    unset: bool
    """Whether all these settings have their defaults."""


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """How packets reach one host."""

    host: str
    address: str
    """The address of ``host``; empty if its name does not resolve."""
    source: str
    interface: str
    """The interface that the route uses; empty if it is unknown."""
    mtu: int
    """The MTU of the route; 0 if it is unknown."""
    mbit_per_s: int
    """The speed of the interface; 0 if the interface does not report one."""


def host_of(url: str) -> str:
    """Returns the host of a control address: ``tcp://host:port`` → ``host``."""
    return urlsplit(url).hostname or ""


def read_listening(transfer: TransferConfig) -> ListenFacts:
    advertise = advertised_host(transfer.host, transfer.advertise)
    error, in_use = _try_bind(transfer.host, transfer.port)
    own = (transfer.host, transfer.port, transfer.advertise)
    plain = TransferConfig()
    unset = own == (plain.host, plain.port, plain.advertise)
    return ListenFacts(transfer.host, transfer.port, error, in_use, advertise, _resolve(advertise), unset)


def _try_bind(host: str, port: int) -> tuple[str, bool]:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as exc:
        return exc.strerror or str(exc), exc.errno == errno.EADDRINUSE
    return "", False


def _resolve(host: str) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    except OSError:
        return ()


def read_route(host: str, sys: Path = Path("/sys")) -> RouteFacts:
    """Asks the kernel for the route to ``host``, without sending anything."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.connect(address)
            source = str(tried.getsockname()[0])
            level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if family == socket.AF_INET6 else (0, _IP_MTU)
            mtu = tried.getsockopt(level, option)
    except OSError:
        return RouteFacts(host, "", "", "", 0, 0)
    interface = _interface_of(source)
    return RouteFacts(host, str(address[0]), source, interface, mtu, _speed(sys / "class/net" / interface / "speed"))


def _interface_of(source: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            if _ipv4_of(asked, name) == source:
                return name
    return _ipv6_interface_of(source)


def _ipv4_of(asked: socket.socket, name: str) -> str:
    try:
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6_interface_of(source: str, table: Path = Path("/proc/net/if_inet6")) -> str:
    try:
        wanted = ipaddress.IPv6Address(source.partition("%")[0]).packed.hex()
        rows = [line.split() for line in table.read_text().splitlines()]
    except (ValueError, OSError):
        return ""
    return next((row[-1] for row in rows if row[0] == wanted), "")


def _speed(file: Path) -> int:
    try:
        return max(0, int(file.read_text()))
    except (OSError, ValueError):
        # Loopback and most virtual devices report no speed.
        return 0


def check_listening(facts: ListenFacts, *, peers_beyond: bool) -> list[Finding]:
    """``peers_beyond`` says whether there are peers on other machines."""
    return [_bindable(facts), _advertised(facts, peers_beyond)]


def _bindable(facts: ListenFacts) -> Finding:
    where = f"{facts.host}:{facts.port or 'any port'}"
    if facts.in_use:
        return warning(
            "transfer port",
            f"{where} is taken",
            "a node runs there already, or give --transfer-port another; 0 is free",
        )
    if facts.bind_error:
        return problem(
            "transfer port", f"{where}: {facts.bind_error}", "give --transfer-host an address of this machine"
        )
    return ok("transfer port", f"{where} can be bound")


def _advertised(facts: ListenFacts, peers_beyond: bool) -> Finding:
    check = "advertised address"
    if not facts.addresses:
        return problem(
            check,
            f"{facts.advertise!r} is not known here",
            "give --transfer-advertise a name or address of this machine",
        )
    seen = facts.advertise if facts.advertise in facts.addresses else f"{facts.advertise}: {', '.join(facts.addresses)}"
    if any(is_loopback(address) for address in facts.addresses):
        if not peers_beyond:
            return ok(check, f"{seen}, local")
        if facts.unset:
            return not_applicable(
                check, f"{seen}: a prefill node here needs --transfer-host, a decode node does not yet"
            )
        advice = "give --transfer-host 0.0.0.0 and --transfer-advertise the address that peers reach this machine by"
        return warning(check, f"{seen} is reached from this machine alone", advice)
    if any(ipaddress.ip_address(address.partition("%")[0]).is_unspecified for address in facts.addresses):
        return warning(check, f"{seen} is no address to connect to", "give --transfer-advertise this machine's address")
    return ok(check, seen)


def check_routes(routes: Sequence[RouteFacts]) -> list[Finding]:
    if not routes:
        return [not_applicable("routes", "no peers were named")]
    return [_route(route) for route in routes]


def _route(route: RouteFacts) -> Finding:
    check = f"route to {route.host}"
    if not route.address:
        return problem(check, "there is none, or the name is not known", "see DNS, /etc/hosts and ip route")
    if is_loopback(route.address):
        return ok(check, f"loopback, MTU {route.mtu}")
    speed = f", {route.mbit_per_s / 1000:g} Gbit/s" if route.mbit_per_s else ""
    seen = f"{route.address} from {route.source} over {route.interface or 'an unnamed device'}, MTU {route.mtu}{speed}"
    if 0 < route.mtu < _JUMBO and route.mbit_per_s >= 10_000:
        return warning(check, seen, "an MTU of 9000 on both hosts and the switch: small packets cost CPU at this speed")
    return ok(check, seen)
