"""What a node has to tell one proxy, and when.

    GREETING ──ProxyWelcome──▶ ANNOUNCING           who the proxy is; Register at once
    ANNOUNCING ──Ack(known)──▶ REGISTERED
    ANNOUNCING ──an interval──▶ GREETING       no answer, or the registry is full
    REGISTERED ──Ack(not known)──▶ GREETING    the proxy was restarted, or dropped us: NodeHello at once
    REGISTERED ──silence──▶ GREETING           ``MISSED_ACKS`` intervals without an answer

When the node's role changes, a heartbeat that names it is due at once, and all later ones name it too.

Nodes that were started together, or that a proxy's restart made register together, do not beat together: the first
heartbeat comes at any moment of the interval, and each later one up to ``JITTER`` of the interval sooner than it must.
None comes later, because nodes do not know after how many intervals the proxy drops them: it may be one.

A proxy that is given by name may have several addresses, as a headless Service has, which ``ProxyNames`` follows. A
thread of its own looks the names up again and again: a look-up may take as long as the system's resolver lets it, and
neither requests nor heartbeats wait for it. A name that cannot be looked up keeps the addresses that it had.
"""

from __future__ import annotations

import enum
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from pdserve.control.frame import Opened, Sealer
from pdserve.wire.discovery import (
    Ack,
    FromProxy,
    MeetNodes,
    NodeHeartbeat,
    NodeHello,
    NodeInfo,
    NodeLoad,
    ProxyRefusal,
    ProxyWelcome,
    Register,
    Role,
    ToProxy,
)
from pdserve.wire.ids import new_id
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.version import SPOKEN, Spoken

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


MISSED_ACKS = 3
JITTER = 0.1


class RegistrationState(enum.Enum):
    GREETING = "greeting"
    ANNOUNCING = "announcing"
    REGISTERED = "registered"


class RegistrationStatus(enum.Enum):
    """How a proxy answers a node. The value says it to people."""

    ACCEPTED = "knows this node"
    UNREACHED = "cannot be reached: nothing that speaks pdserve's control protocol listens there"
    SILENT = "does not answer: its cluster secret is another one, its clock is wrong, or it hangs"
    TURNED_AWAY = "turns this node away: its registry is full"
    REFUSED = "refuses this node, and the node's log says why"


@dataclass(frozen=True, slots=True)
class ProxyView:
    """How one proxy sees a node."""

    status: RegistrationStatus
    role: Role | None = None
    """The role by which the proxy routes, if the node has sent it one."""
    to_meet: tuple[PrefillTarget, ...] = ()
    """The nodes that this one is to connect to, as the proxy has said last."""

    @property
    def accepted(self) -> bool:
        return self.status is RegistrationStatus.ACCEPTED


class ProxyLink:
    """The node's side of its registration at one proxy, without I/O. Times are seconds on one monotonic clock.

    ``heartbeat_s`` counts until the proxy has sent its own.
    """

    def __init__(
        self,
        node: NodeInfo,
        heartbeat_s: float,
        load: Callable[[], NodeLoad],
        now: float,
        all_proxies: Callable[[], tuple[bytes, ...]] = tuple,
        chance: Callable[[], float] | None = None,
    ) -> None:
        """``all_proxies`` returns the boot ids of the proxies that know this node, whichever link they are at.

        ``chance`` returns a number from 0 on and below 1, of which 0 is no jitter.
        """
        self.state = RegistrationState.GREETING
        self.refusal = ""
        """Why the proxy does not take this node; empty if it has not said no."""
        self.known_role: Role | None = None
        """The role by which the proxy routes, as it has said since the role changed; None if it has not."""
        self.to_meet: tuple[PrefillTarget, ...] = ()
        """The nodes that this one is to connect to, as the proxy has said last."""
        self._met = False
        self._registration: Register | None = None
        """What was sent last to register."""
        self._role: Role | None = None
        """The present role; None if it is still that of the start."""
        self._node = node
        self._configured_s = self._heartbeat_s = heartbeat_s
        self._load = load
        self._all_proxies = all_proxies
        # A boot id is random already: nodes differ, and none asks for more randomness.
        self._chance = chance or Random(node.boot_id).random  # noqa: S311 (nothing secret hangs on it)
        self._due_s = now
        self._heard_s = now
        self._unanswered = 0
        """The heartbeats since the proxy was heard. The silence of a node that was stopped is its own."""
        self._turned_away = False
        self._draining = False
        self._nonce = b""
        self._proxy: bytes | None = None
        """The boot id of the proxy; None if it is not known."""

    def status(self, *, connected: bool) -> RegistrationStatus:
        """Returns how the proxy answers. ``connected`` says whether there was a connection for the last message."""
        if self.state is RegistrationState.REGISTERED:
            return RegistrationStatus.ACCEPTED
        if not connected:
            return RegistrationStatus.UNREACHED
        if self.refusal:
            return RegistrationStatus.REFUSED
        return RegistrationStatus.TURNED_AWAY if self._turned_away else RegistrationStatus.SILENT

    @property
    def accepted_by(self) -> bytes:
        """The boot id of the proxy, if it knows this node; empty if it does not."""
        return self._proxy or b"" if self.state is RegistrationState.REGISTERED else b""

    @property
    def knows_proxy(self) -> bool:
        """Whether the proxy has answered the latest greeting, so that messages can name it."""
        return self._proxy is not None

    @property
    def due_s(self) -> float:
        """The time when ``tick`` has something to send next."""
        return self._due_s

    def announce(self, role: Role, now: float) -> None:
        """Makes this the role that the proxy hears of, at once if the node is registered there.

        A second call with the same role does nothing.
        """
        if role is self._role:
            return
        self._role, self.known_role = role, None
        self._node = msgspec.structs.replace(self._node, role=role)
        if self.state is RegistrationState.REGISTERED:
            self._due_s = now

    def met(self, now: float) -> None:
        """Tells the proxy, now and in every message, that this node has met others. A second call does nothing."""
        if not self._met:
            self._met = True
            if self.state is RegistrationState.REGISTERED:
                self._due_s = now

    def drain(self, now: float) -> None:
        """Tells the proxy, now and in every heartbeat, that this node takes no new work. A second call does nothing."""
        if not self._draining:
            self._draining = True
            self._due_s = now

    def tick(self, now: float) -> tuple[ToProxy, ...]:
        """Returns the messages that are due now."""
        if now < self._due_s:
            return ()
        sooner = JITTER * self._chance() if self.state is RegistrationState.REGISTERED else 0.0
        self._due_s = now + self._heartbeat_s * (1.0 - sooner)
        silent = self._unanswered >= MISSED_ACKS - 1 and now - self._heard_s >= MISSED_ACKS * self._heartbeat_s
        if self.state is RegistrationState.REGISTERED and silent:
            self._greet(now)
        match self.state:
            case RegistrationState.GREETING:
                self._proxy = None
                self._nonce = new_id()
                return (NodeHello(self._node.boot_id, self._nonce, SPOKEN.newest, SPOKEN.oldest),)
            case RegistrationState.ANNOUNCING:
                self.state = RegistrationState.GREETING  # again, unless it is acknowledged
                self._registration = Register(self._node, self._met)
                return (self._registration,)
            case RegistrationState.REGISTERED:
                self._unanswered += 1
                known = self._all_proxies()
                return (NodeHeartbeat(self._node.boot_id, self._load(), self._role, self._draining, known, self._met),)

    def seal(self, sealer: Sealer, message: ToProxy) -> bytes:
        """Returns the frame of a message to this proxy. A greeting names no receiver, which is not known then."""
        return sealer.seal(message, self._proxy)

    def unsent(self, now: float) -> None:
        """Makes the last message due again: it found no connection, and now there is one."""
        self._due_s = now

    def answered(self, opened: Opened[FromProxy], now: float) -> None:
        """Takes the proxy's answer.

        An answer that names no receiver, is about another boot of this node, or to another greeting, is ignored.
        """
        if not opened.named or opened.message.boot_id != self._node.boot_id:
            return
        match opened.message:
            case Ack():
                self._on_ack(opened.message, opened.sender, now)
            case MeetNodes(nodes=nodes) if opened.sender == self._proxy:
                self.to_meet = nodes
            case ProxyWelcome() if opened.message.nonce == self._nonce:
                self._on_welcome(opened.message, opened.sender, now)
            case ProxyRefusal(reason=reason) if self.state is not RegistrationState.REGISTERED:
                self.refusal = reason

    def _on_welcome(self, welcome: ProxyWelcome, proxy: bytes, now: float) -> None:
        self._nonce = b""
        theirs = Spoken(welcome.protocol, welcome.oldest_protocol)
        if SPOKEN.common(theirs) is None:
            self.refusal = f"protocol is {SPOKEN} here and {theirs} there: upgrade the older one"
            return
        self._proxy = proxy
        self._heartbeat_s = welcome.heartbeat_ms / 1000
        self.state = RegistrationState.ANNOUNCING
        self._due_s = now

    def _on_ack(self, ack: Ack, proxy: bytes, now: float) -> None:
        self._turned_away = not ack.known
        if proxy == self._proxy and ack.known:
            self._heard_s, self._unanswered = now, 0
            self.known_role = ack.role
            if self.state is not RegistrationState.REGISTERED:
                # A registration never says that the node drains, and may be older than what the node has to say now.
                said_all = not self._draining and self._registration == Register(self._node, self._met)
                sooner_s = self._heartbeat_s * self._chance()
                self._due_s = max(now, self._due_s - sooner_s) if said_all else now
            self.state = RegistrationState.REGISTERED
            self.refusal = ""
        elif not ack.known and self.state is RegistrationState.REGISTERED:
            # Also if another process says so: it has taken the proxy's place.
            self._greet(now)
            self._due_s = now

    def _greet(self, now: float) -> None:
        self.state = RegistrationState.GREETING
        self._proxy = self.known_role = None
        self._heartbeat_s = self._configured_s
        self._due_s = now + self._heartbeat_s
