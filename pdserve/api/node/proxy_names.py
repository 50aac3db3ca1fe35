"""Finds the addresses of the proxies behind names, and follows them as they change.

A name may stand for several proxies, as that of a headless Service does. A thread of its own looks the names up again
and again: a look-up may take as long as the system's resolver lets it, and neither requests nor heartbeats wait for it.
A name that cannot be looked up keeps the addresses that it had.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from typing import TypeAlias
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

MAX_PROXIES = 64
"""The number of proxies that a node registers at. All nodes take the same ones of more addresses."""
UNKNOWN_RETRY_S = 1.0
"""A name that has no address yet is looked up again this soon, or sooner if the interval is shorter."""

LookUp: TypeAlias = Callable[[str], tuple[str, ...]]
"""Returns the IP addresses of a host's name. Raises OSError if it has none now."""


def is_name(proxy: str) -> bool:
    """Returns whether ``proxy``, ``tcp://host:port``, has a name as its host, which has to be looked up."""
    try:
        host = urlsplit(proxy).hostname or ""
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return bool(host)
    return False


def look_up(host: str) -> tuple[str, ...]:
    """Returns the IPv4 addresses of ``host``, or its IPv6 addresses if it has no others. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    of_family = {
        family: sorted({str(address[0]) for this, _, _, _, address in found if this is family})
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    return tuple(of_family[socket.AF_INET] or of_family[socket.AF_INET6])


class ProxyNames:
    """Looks up the names among ``proxies`` in a thread, from ``start`` until ``stop``."""

    def __init__(
        self,
        proxies: tuple[str, ...],
        every_s: float,
        tell: Callable[[tuple[str, ...]], None],
        look_up: LookUp = look_up,
    ) -> None:
        """``tell`` is called in the thread with the addresses of all proxies, at first and whenever they change."""
        self._proxies = proxies
        self._every_s = every_s
        self._tell = tell
        self._look_up = look_up
        self._found: dict[str, tuple[str, ...]] = {proxy: () for proxy in proxies if is_name(proxy)}
        self._failures: dict[str, str] = {}
        self._reported: tuple[str, ...] = ()
        self._stopping = threading.Event()
        # A daemon, since nothing ends a look-up that hangs.
        self._thread = threading.Thread(target=self._run, name="proxy-names", daemon=True)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why names have no address, in words."""
        return tuple(f"{proxy} has no address: {why}" for proxy, why in tuple(self._failures.items()))

    def start(self) -> None:
        """Begins, if there are names at all."""
        if self._found:
            self._thread.start()

    def stop(self) -> None:
        """Lets the thread end. A look-up that is under way changes nothing any more."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for proxy in self._found:
                self._refresh(proxy)
            self._tell_change()
            unknown = not all(self._found.values())
            self._stopping.wait(min(UNKNOWN_RETRY_S, self._every_s) if unknown else self._every_s)

    def _refresh(self, proxy: str) -> None:
        parts = urlsplit(proxy)
        try:
            addresses = self._look_up(parts.hostname or "")
        except (OSError, UnicodeError) as exc:
            if proxy not in self._failures:
                log.warning("the addresses of proxy %s cannot be looked up: %s", proxy, exc)
            self._failures[proxy] = str(exc)
            return
        self._failures.pop(proxy, None)
        self._found[proxy] = tuple(
            f"tcp://[{address}]:{parts.port}" if ":" in address else f"tcp://{address}:{parts.port}"
            for address in addresses
        )

    def _tell_change(self) -> None:
        addresses = addresses_of(self._proxies, self._found)
        if addresses == self._reported or self._stopping.is_set():
            return
        if len(addresses) > MAX_PROXIES:
            log.warning("--proxy names %d addresses: the node registers at %d of them", len(addresses), MAX_PROXIES)
        self._reported = addresses
        self._tell(addresses[:MAX_PROXIES])


def addresses_of(proxies: tuple[str, ...], found: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the addresses of ``proxies``, each once, with those that were ``found`` in the place of names."""
    return tuple(dict.fromkeys(address for proxy in proxies for address in found.get(proxy, (proxy,))))
