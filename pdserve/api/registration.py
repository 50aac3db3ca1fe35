"""A node's side of discovery: tells every proxy that it is there, and goes on doing so.

To each proxy, one at a time:

    ANNOUNCING ──Ack(known)──▶ REGISTERED      sends Register every interval until one is acknowledged
    REGISTERED ──Ack(not known)──▶ ANNOUNCING  the proxy was restarted, or dropped us: Register at once
    REGISTERED ──silence──▶ ANNOUNCING         ``MISSED_ACKS`` intervals without an answer

A proxy that is down costs nothing: frames go only to connections that stand, so none is kept to grow stale.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import zmq
import zmq.asyncio

from pdserve.errors import ConfigError, WireError
from pdserve.wire.discovery import Ack, Deregister, Heartbeat, Load, NodeInfo, Register, ToProxy
from pdserve.wire.frame import Opener, Purpose, Sealer

log = logging.getLogger(__name__)

MISSED_ACKS = 3
GOODBYE_MS = 200
"""How long a ``Deregister`` may take to leave."""
MAX_MESSAGE_BYTES = 64 * 1024

_QUEUED_FRAMES = 4


class LinkState(enum.Enum):
    ANNOUNCING = "announcing"
    REGISTERED = "registered"


class Link:
    """What this node has to tell one proxy, and when. Sans-IO; times are seconds on one monotonic clock."""

    def __init__(self, node: NodeInfo, heartbeat_s: float, load: Callable[[], Load], now: float) -> None:
        self.state = LinkState.ANNOUNCING
        self._node = node
        self._heartbeat_s = heartbeat_s
        self._load = load
        self._due_s = now
        self._heard_s = now

    @property
    def due_s(self) -> float:
        """When ``tick`` has something to send next."""
        return self._due_s

    def tick(self, now: float) -> ToProxy | None:
        """The message to send now, if one is due."""
        if now < self._due_s:
            return None
        self._due_s = now + self._heartbeat_s
        if self.state is LinkState.REGISTERED and now - self._heard_s >= MISSED_ACKS * self._heartbeat_s:
            self.state = LinkState.ANNOUNCING
        if self.state is LinkState.REGISTERED:
            return Heartbeat(self._node.boot_id, self._load())
        return Register(self._node)

    def unsent(self, now: float) -> None:
        """The last message found no connection; there is one now, so it is due again."""
        self._due_s = now

    def acknowledged(self, ack: Ack, now: float) -> None:
        """Take the proxy's answer. One about another boot of this node is ignored."""
        if ack.boot_id != self._node.boot_id:
            return
        self._heard_s = now
        if ack.known:
            self.state = LinkState.REGISTERED
        elif self.state is LinkState.REGISTERED:
            self.state = LinkState.ANNOUNCING
            self._due_s = now


class Registration:
    """Keeps one node registered at every proxy while ``run`` runs."""

    def __init__(
        self, node: NodeInfo, proxies: tuple[str, ...], secret: bytes, heartbeat_ms: int, load: Callable[[], Load]
    ) -> None:
        """``proxies`` are control addresses, ``tcp://host:port``; ``load`` is called for every heartbeat."""
        self._node = node
        self._proxies = tuple(dict.fromkeys(proxies))
        self._secret = secret
        self._heartbeat_s = heartbeat_ms / 1000
        self._load = load
        self._registered = {proxy: asyncio.Event() for proxy in self._proxies}

    @property
    def registered(self) -> Mapping[str, asyncio.Event]:
        """By proxy address: set while that proxy knows this node."""
        return MappingProxyType(self._registered)

    async def run(self) -> None:
        """Register and send heartbeats until cancelled; then say goodbye, within ``GOODBYE_MS``.

        Returns at once if there is no proxy to register at.

        Raises ConfigError for an address that is none.
        """
        context = zmq.asyncio.Context()
        sockets: dict[str, zmq.asyncio.Socket] = {}
        sealers = {proxy: Sealer(self._secret, Purpose.DISCOVERY, self._node.boot_id) for proxy in self._proxies}
        try:
            for proxy in self._proxies:
                sockets[proxy] = context.socket(zmq.DEALER)
                _connect(sockets[proxy], proxy, self._heartbeat_s)
            async with asyncio.TaskGroup() as tasks:
                for proxy, socket in sockets.items():
                    tasks.create_task(self._keep(socket, sealers[proxy], self._registered[proxy], proxy))
        finally:
            for proxy, socket in sockets.items():
                await _send(socket, sealers[proxy].seal(Deregister(self._node.boot_id)))
                self._registered[proxy].clear()
                socket.close(linger=GOODBYE_MS)
            context.term()

    async def _keep(self, socket: zmq.asyncio.Socket, sealer: Sealer, registered: asyncio.Event, proxy: str) -> None:
        opener = Opener(self._secret, Purpose.DISCOVERY, Ack)
        link = Link(self._node, self._heartbeat_s, self._load, time.monotonic())
        sent = True
        while True:
            message = link.tick(time.monotonic())
            if message is not None:
                sent = await _send(socket, sealer.seal(message))
            _show(link.state, registered, proxy)
            ready = await _ready(socket, link.due_s - time.monotonic(), to_send=not sent)
            if ready & zmq.POLLOUT:
                link.unsent(time.monotonic())
            if ready & zmq.POLLIN:
                ack = _opened(opener, await socket.recv_multipart(), proxy)
                if ack is not None:
                    link.acknowledged(ack, time.monotonic())


def _connect(socket: zmq.asyncio.Socket, proxy: str, heartbeat_s: float) -> None:
    interval_ms = max(1, int(heartbeat_s * 1000))
    socket.set(zmq.IMMEDIATE, 1)
    socket.set(zmq.SNDHWM, _QUEUED_FRAMES)
    socket.set(zmq.RCVHWM, 4 * _QUEUED_FRAMES)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.LINGER, GOODBYE_MS)
    socket.set(zmq.IPV6, int("[" in proxy))
    socket.set(zmq.RECONNECT_IVL, min(100, interval_ms))
    socket.set(zmq.RECONNECT_IVL_MAX, max(100, interval_ms))
    # A host that vanished leaves a connection that still takes frames; ZMTP's own pings find that out.
    socket.set(zmq.HEARTBEAT_IVL, interval_ms)
    socket.set(zmq.HEARTBEAT_TIMEOUT, MISSED_ACKS * interval_ms)
    try:
        socket.connect(proxy)
    except zmq.ZMQError as exc:
        raise ConfigError(f"proxy address {proxy!r} is not tcp://host:port: {exc}") from exc


async def _ready(socket: zmq.asyncio.Socket, timeout_s: float, *, to_send: bool) -> int:
    """What the socket is ready for, ``POLLIN`` or ``POLLOUT``, after ``timeout_s`` at the latest."""
    poller = zmq.asyncio.Poller()
    poller.register(socket, zmq.POLLIN | zmq.POLLOUT if to_send else zmq.POLLIN)
    events = await poller.poll(max(0, int(timeout_s * 1000) + 1))
    return sum(mask for _, mask in events)


async def _send(socket: zmq.asyncio.Socket, frame: bytes) -> bool:
    """Send if there is a connection with room for it; a frame that waits would only be too old later."""
    try:
        await socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _opened(opener: Opener[Ack], parts: list[bytes], proxy: str) -> Ack | None:
    try:
        return opener.open(parts[-1])
    except WireError as exc:
        log.warning("dropped a message from proxy %s: %s", proxy, exc)
        return None


def _show(state: LinkState, registered: asyncio.Event, proxy: str) -> None:
    if state is LinkState.REGISTERED and not registered.is_set():
        registered.set()
        log.info("registered at proxy %s", proxy)
    elif state is LinkState.ANNOUNCING and registered.is_set():
        registered.clear()
        log.warning("proxy %s does not answer, or no longer knows this node", proxy)
