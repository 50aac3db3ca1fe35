"""Takes nodes' registrations and heartbeats from a ZMQ ROUTER socket into the registry.

A proxy that is late itself drops no node for it: it handles the messages that wait in the socket before a lease may
expire, and extends all leases by the time by which it was late.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from pdserve.config import RegistryConfig
from pdserve.control.connection_guard import ConnectionGuard, MessageReader, RoutedMessage
from pdserve.control.frame import MAX_REASON_CHARS, ClockSkew, Opened, Opener, Purpose, Sealer, Secrets
from pdserve.errors import (
    AuthenticationFailed,
    ConfigError,
    MalformedFrame,
    StaleFrame,
    UnreadableMessage,
    WireError,
    WrongReceiver,
)
from pdserve.log_format import LogThrottle
from pdserve.wire.discovery import (
    Ack,
    ComputeCores,
    Deregister,
    FromProxy,
    MeetNodes,
    NodeHeartbeat,
    NodeHello,
    NodeInfo,
    ProxyRefusal,
    ProxyWelcome,
    Register,
    Role,
    ToProxy,
)
from pdserve.wire.status import IncidentKind
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.version import SPOKEN, Spoken
from pdserve_proxy.recent import Incidents
from pdserve_proxy.registry.registry import MAX_NODES, Registry

log = logging.getLogger(__name__)

_NAMED = 8
"""So many nodes, and so many ranges of cores, are named."""

MAX_MESSAGE_BYTES = 64 * 1024
MAX_BURST = 256
"""The number of frames that are handled before the event loop gets its turn."""
FULL_BURSTS = MAX_NODES // MAX_BURST
"""After so many full bursts in a row leases may expire although more frames wait.

A ROUTER takes a frame of each sender in turn, so every node has had its turn by then, and no flood of messages keeps
dead nodes in the registry. (A flood of messages of very many parts does while it lasts: no node can be heard then.)
"""
WARN_EVERY_S = 10.0
MAX_TOLD = 64
"""When a node registers, so many others hear at once that they are to meet it. The rest hears with an answer."""


class DropCause(enum.Enum):
    """Why a discovery frame was not acceptable."""

    AUTHENTICATION = "authentication"
    """Its sender has another secret, or somebody has sent it before."""
    LATE = "late"
    """A process of this cluster sent it too long ago, or to the proxy that was at this address before."""
    MALFORMED = "malformed"

    @classmethod
    def of(cls, error: WireError) -> DropCause:
        if isinstance(error, WrongReceiver | StaleFrame):
            return cls.LATE
        return cls.AUTHENTICATION if isinstance(error, AuthenticationFailed) else cls.MALFORMED


class DiscoveryServer:
    """The owner of the control socket: binds it when it is made, and closes it as a context manager."""

    def __init__(
        self,
        registry: Registry,
        secret: bytes | Secrets,
        boot_id: bytes,
        on_dropped: Callable[[DropCause], None],
        *,
        host: str,
        port: int,
        clock: Callable[[], float] = time.monotonic,
        incidents: Incidents | None = None,
        clocks: ClockSkew | None = None,
    ) -> None:
        """``on_dropped`` is called with the cause for which a frame is dropped. ``clocks`` notes those of the nodes.

        Raises ConfigError if the address cannot be bound.
        """
        self._registry = registry
        self._on_dropped = on_dropped
        self._incidents = incidents or Incidents(clock)
        self._clock = clock
        self._live_proxies = 1
        self._routes: dict[bytes, bytes] = {}
        """Where the last message of each registered node came from, by boot id."""
        self._told: dict[bytes, tuple[PrefillTarget, ...]] = {}
        """Whom each of them was told to meet last, if anybody."""
        registry.on_node(self._forget_gone)
        self._next_count_s = 0.0
        self._opener: Opener[ToProxy] = Opener(
            secret, Purpose.DISCOVERY, _to_proxy_type(), receiver=boot_id, skew=clocks
        )
        self._sealer = Sealer(secret, Purpose.DISCOVERY, boot_id)
        self._drops, self._refusals = LogThrottle(WARN_EVERY_S), LogThrottle(WARN_EVERY_S)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._reader = MessageReader(zmq.Socket.shadow(self._socket.underlying))
        self._guard = ConnectionGuard((MAX_BURST + 2) * MAX_MESSAGE_BYTES)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            self.endpoint = _bind(self._socket, host, port)
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"cannot take registrations on {host}:{port}: {exc}") from exc
        self._port = int(self.endpoint.rpartition(":")[2])

    @classmethod
    def bind(
        cls,
        config: RegistryConfig,
        registry: Registry,
        secret: bytes | Secrets,
        boot_id: bytes,
        on_dropped: Callable[[DropCause], None],
        incidents: Incidents | None = None,
        clocks: ClockSkew | None = None,
    ) -> Self:
        """Returns a server that listens as ``config`` says. Raises ConfigError if the address cannot be bound."""
        host, port = config.control_host, config.control_port
        return cls(registry, secret, boot_id, on_dropped, host=host, port=port, incidents=incidents, clocks=clocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    async def run(self) -> None:
        """Serves until it is cancelled."""
        guarding = asyncio.create_task(self._guard_connections())
        try:
            await self._serve()
        finally:
            guarding.cancel()
            await asyncio.wait([guarding])

    async def _guard_connections(self) -> None:
        """Feeds the connection guard and lets it check, until it is cancelled."""
        next_check = 0.0
        while True:
            wait_ms = max(0, int((next_check - time.monotonic()) * 1000) + 1) if self._guard.watching else None
            if await self._monitor.poll(wait_ms):
                event = parse_monitor_message(await self._monitor.recv_multipart())
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._guard.accepted(event["value"])
                else:
                    self._guard.ended(event["value"])
            if (now := time.monotonic()) >= next_check:
                self._guard.check(self._port)
                next_check = now + self._guard.check_s

    async def _serve(self) -> None:
        bursts = 0
        while True:
            now = await self._wait()
            # The poll's result does not matter: if the loop was late, its timer may have fired before a frame was seen.
            bursts = 0 if await self._receive_burst() else bursts + 1
            if bursts % FULL_BURSTS == 0:
                for node in self._registry.expire(now):
                    log.warning("node %s (%s) dropped: no heartbeat", node.info.name, node.info.url)
                    self._incidents.add(IncidentKind.NODE_LOST, "no heartbeat came any more", node=node.info.name)
            if now >= self._next_count_s:  # not at every heartbeat: while nodes find a new proxy, their counts differ
                self._next_count_s = now + self._registry.heartbeat_s
                self._log_proxies(self._registry.live_proxies)

    async def _wait(self) -> float:
        """Waits until a frame has come or a lease may have run out, and returns the time.

        If the wait takes longer than it should, all leases are extended by the excess. A wait is at most half a
        heartbeat long: nothing tells when in it the process was stopped, so that much may be counted wrongly.
        """
        if self._reader.dropping:
            return await self._let_others_run()
        expiry = self._registry.next_expiry()
        if expiry is None:
            await self._socket.poll()
            return self._clock()
        now = self._clock()
        wait_ms = int(max(0.0, min(self._registry.heartbeat_s / 2, expiry - now)) * 1000) + 1
        await self._socket.poll(wait_ms)
        due, now = now + wait_ms / 1000, self._clock()
        self._registry.extend_leases(max(0.0, now - due))
        return now

    async def _let_others_run(self) -> float:
        """Gives the event loop a turn, extends the leases by it since no node can be heard, and returns the time."""
        began = self._clock()
        await asyncio.sleep(0)
        now = self._clock()
        self._registry.extend_leases(now - began)
        return now

    async def _receive_burst(self) -> bool:
        """Handles the frames that wait, at most ``MAX_BURST``. Returns whether none is left."""
        for _ in range(MAX_BURST):
            began = self._clock()
            message = self._reader.read()
            if self._reader.dropping:
                # No other node could be heard.
                self._registry.extend_leases(self._clock() - began)
            if message is None:
                return not self._reader.dropping
            self._guard.heard(message.connection)
            await self._take(message)
        return False

    async def _take(self, message: RoutedMessage) -> None:
        route = message.route
        try:
            opened = self._opener.open_from(message.frame)
            self._guard.trusted(message.connection)
            await self._answer(route, opened)
        except WrongReceiver as exc:
            # The node takes this process for another, as after a restart of this proxy: it has to send NodeHello again.
            self._dropped(exc)
            await self._send(route, exc.sender, Ack(exc.sender, known=False))
        except UnreadableMessage as exc:
            self._dropped(exc)
            if exc.body:
                await self._send(route, exc.sender, ProxyRefusal(exc.sender, str(exc)[:MAX_REASON_CHARS]))
        except WireError as exc:
            self._dropped(exc)

    async def _answer(self, route: bytes, opened: Opened[ToProxy]) -> None:
        message = opened.message
        boot_id = message.node.boot_id if isinstance(message, Register) else message.boot_id
        if isinstance(message, NodeHello):
            await self._send(route, boot_id, self._answer_hello(message))
        elif not opened.named:
            raise AuthenticationFailed("the frame names no receiver, and is no greeting")
        elif opened.sender != boot_id:
            raise AuthenticationFailed("the frame is of another node than its message")
        else:
            await self._handle(route, message, boot_id)

    def _answer_hello(self, hello: NodeHello) -> ProxyWelcome | ProxyRefusal:
        theirs = Spoken(hello.protocol, hello.oldest_protocol)
        if SPOKEN.common(theirs) is None:
            log.warning("a node was refused: it speaks protocol %s, this proxy %s", theirs, SPOKEN)
            return ProxyRefusal(
                hello.boot_id, f"protocol is {theirs} here and {SPOKEN} at the proxy: upgrade the older one"
            )
        heartbeat_ms = max(1, round(self._registry.heartbeat_s * 1000))
        return ProxyWelcome(hello.boot_id, hello.nonce, SPOKEN.newest, SPOKEN.oldest, heartbeat_ms)

    async def _handle(self, route: bytes, message: Register | NodeHeartbeat | Deregister, boot_id: bytes) -> None:
        before, drained = self._registry.node(boot_id), boot_id in self._registry.draining
        try:
            answer = self._registry.handle(message, self._clock())
        except MalformedFrame as exc:
            self._dropped(exc)
            await self._send(route, boot_id, ProxyRefusal(boot_id, str(exc)[:MAX_REASON_CHARS]))
            return
        self._log_change(message, answer, before)
        self._note_change(message, answer, before, drained=drained)
        if isinstance(message, Register) and before is None and answer is not None and answer.known:
            self._look_at_cores(message.node)
        if answer is None:
            return
        if answer.known and not isinstance(message, Deregister):
            self._routes[boot_id] = route
            await self._tell_whom_to_meet(boot_id, again=not message.met)
            await self._introduce(boot_id, before)
        await self._send(route, boot_id, answer)

    async def _introduce(self, boot_id: bytes, before: NodeInfo | None) -> None:
        """Tells nodes at once that wait for somebody to meet, if this node is new or has another role."""
        now = self._registry.node(boot_id)
        if now is not None and (before is None or before.role is not now.role):
            for other in islice(self._registry.unmet, MAX_TOLD):
                await self._tell_whom_to_meet(other, again=False)

    async def _tell_whom_to_meet(self, boot_id: bytes, *, again: bool) -> None:
        """Tells a node whom it is to meet, if that has changed, or ``again``: a message may have been lost."""
        nodes = self._registry.to_meet(boot_id)
        if boot_id in self._routes and (nodes != self._told.get(boot_id, ()) or (again and nodes)):
            self._told[boot_id] = nodes
            await self._send(self._routes[boot_id], boot_id, MeetNodes(boot_id, nodes))

    def _forget_gone(self, boot_id: bytes) -> None:
        if boot_id in self._routes and self._registry.node(boot_id) is None:
            del self._routes[boot_id]
            self._told.pop(boot_id, None)

    async def _send(self, route: bytes, boot_id: bytes, answer: FromProxy) -> None:
        try:
            # These are statements: a node ignores fields that it does not know.
            await self._socket.send_multipart([route, self._sealer.seal(answer, boot_id)], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            log.debug("answer not sent: %s", exc)

    def _dropped(self, exc: WireError) -> None:
        self._on_dropped(DropCause.of(exc))
        if count := self._drops.add(self._clock()):
            log.warning("%d discovery frames dropped, the last one because: %s", count, exc)

    def _log_proxies(self, live: int) -> None:
        if live != self._live_proxies:
            log.info(
                "the cluster has %d proxies now, and had %d: limits of API keys are divided", live, self._live_proxies
            )
            self._incidents.add(IncidentKind.PROXIES_CHANGED, f"{live} now, {self._live_proxies} before")
            self._live_proxies = live

    def _look_at_cores(self, newcomer: NodeInfo) -> None:
        if newcomer.compute is None:
            return
        shared = crowded_with(newcomer, self._registry.neighbours(newcomer.compute.machine))
        if shared is not None:
            log.warning("%s", shared)
            self._incidents.add(IncidentKind.CORES_SHARED, str(shared), node=newcomer.name)

    def _note_change(self, message: ToProxy, answer: Ack | None, before: NodeInfo | None, *, drained: bool) -> None:
        add = self._incidents.add
        match message:
            case NodeHeartbeat() if before is not None:
                if message.role not in (None, before.role):
                    text = f"was a {before.role.value} node, is a {message.role.value} node"
                    add(IncidentKind.ROLE_CHANGED, text, node=before.name)
                if message.draining and not drained:
                    add(IncidentKind.NODE_DRAINS, "takes no new work", node=before.name)
            case Register(node=info) if before is None and answer is not None and answer.known:
                add(IncidentKind.NODE_JOINED, f"a {info.role.value} node of {info.model}", node=info.name)
            case Deregister() if before is not None:
                # Where --drain is finish it does so in good order, too, and otherwise its engine is lost.
                text = "said goodbye" if drained else "said goodbye and had not drained: its log says why"
                add(IncidentKind.NODE_LEFT, text, node=before.name)

    def _log_change(self, message: ToProxy, answer: Ack | None, before: NodeInfo | None) -> None:
        match message:
            case NodeHeartbeat(role=Role() as role) if before is not None and before.role is not role:
                log.info(
                    "node %s (%s) was a %s node and is a %s node now",
                    before.name,
                    before.url,
                    before.role.value,
                    role.value,
                )
            case Register(node=info) if answer is not None and answer.known:
                log.info("node %s (%s, %s, model %s) registered", info.name, info.role.value, info.url, info.model)
            case Register(node=info):
                if count := self._refusals.add(self._clock()):
                    log.warning("the registry is full: %d nodes turned away, the last one is %s", count, info.name)
            case Deregister() if before is not None:
                log.info("node %s (%s) deregistered", before.name, before.url)


def _bind(socket: zmq.asyncio.Socket, host: str, port: int) -> str:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.RCVHWM, MAX_BURST)
    socket.set(zmq.SNDHWM, MAX_BURST)
    socket.set(zmq.IPV6, int(":" in host))
    address = f"[{host}]" if ":" in host else host
    socket.bind(f"tcp://{address}:{port or '*'}")
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode("ascii")


def _to_proxy_type() -> type[ToProxy]:
    return ToProxy  # type: ignore[return-value]  # a union is what msgspec takes


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Nodes whose engines have too few cores together.

    Two engines on the same cores wait for each other's threads, and each is several times slower. Nothing on their
    machine tells them of each other if they run in containers of their own. The proxy knows both.
    """

    names: tuple[str, ...]
    cores: frozenset[int]
    threads: int

    def __str__(self) -> str:
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        count = len(self.cores)
        return (
            f"{', '.join(self.names[:_NAMED])}{more} share {count} core{'s' if count > 1 else ''} of one machine "
            f"({_ranges(self.cores)}) and compute with {self.threads} threads, which makes each several times slower: "
            "give each node cores of its own with --cores, or each container with a cpuset or a whole number as its "
            "CPU limit"
        )


def crowded_with(newcomer: NodeInfo, neighbours: Iterable[NodeInfo]) -> SharedCores | None:
    """Returns the smallest group of nodes on the newcomer's machine to which it belongs and which lacks cores.

    A node of the newcomer's name is what it replaces, and may be gone. Engines with a quota of CPU time may run on all
    cores and use few at a time: only where all threads of those that are bound to some cores exceed these, they share.
    """
    own = newcomer.compute
    if own is None or not own.machine:
        return None
    there = {newcomer.name: own}
    for node in neighbours:
        if node.name != newcomer.name and node.compute is not None and node.compute.machine == own.machine:
            there[node.name] = node.compute
    # The newcomer's cores with those of each engine on any of them, and with those of all of these.
    places = {
        frozenset(own.cores).union(compute.cores)
        for compute in there.values()
        if not set(own.cores).isdisjoint(compute.cores)
    }
    places.add(frozenset(own.cores).union(*places))
    groups = (_bound_to(place, there) for place in sorted(places, key=lambda place: (len(place), sorted(place))))
    return next((group for group in groups if len(group.names) > 1 and group.threads > len(group.cores)), None)


def _bound_to(place: frozenset[int], there: dict[str, ComputeCores]) -> SharedCores:
    bound = {name: compute for name, compute in there.items() if place.issuperset(compute.cores)}
    return SharedCores(tuple(sorted(bound)), place, sum(compute.threads for compute in bound.values()))


def _ranges(cores: frozenset[int]) -> str:
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    named = [f"{first}-{last}" if last > first else str(first) for first, last in ranges[:_NAMED]]
    return ",".join(named) + ("…" if len(ranges) > _NAMED else "")
