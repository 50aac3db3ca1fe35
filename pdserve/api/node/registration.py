"""Keeps a node registered at every proxy.

A thread of its own talks to the proxies, so that a node's heartbeats are not behind its request work. An event loop
that has just been given thousands of requests takes seconds for one turn, and a heartbeat takes several turns. The
thread needs none of them. It does look whether there still are any: for a loop that has not turned for ``stuck_s``,
or for ``STILL_S`` in which it did not run either, it says nothing, so that the proxies drop a node that hangs.

A proxy that is down costs nothing: frames go only to connections that stand, so none is stored and grows stale. What is
sent to a proxy, and when, is decided in ``proxy_link``.

``ProxyNames`` finds the addresses of proxies that are given by name. The node registers at a new address at once. It
forgets an address that a name no longer has when the proxy there has not answered for its lease: a proxy that shuts
down loses its name first, and still relays what it has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import MappingProxyType
from typing import cast

import msgspec
import zmq

from pdserve.api.node.proxy_link import (
    MISSED_ACKS,
    LookUp,
    ProxyLink,
    ProxyNames,
    ProxyView,
    RegistrationStatus,
    is_name,
    look_up,
)
from pdserve.control.frame import Opened, Opener, Purpose, Sealer, Secrets
from pdserve.errors import ConfigError, WireError
from pdserve.liveness import Motion, Silence, motion_of
from pdserve.log_format import LogThrottle
from pdserve.wire.discovery import MAX_REPORTED_PROXIES, Deregister, FromProxy, NodeInfo, NodeLoad, Role, ToProxy
from pdserve.wire.terms import PrefillTarget

log = logging.getLogger(__name__)

GOODBYE_MS = 200
"""How long a ``Deregister`` may take to leave."""
MAX_MESSAGE_BYTES = 64 * 1024
IDLE_S = 60.0
"""The thread looks around after so many seconds at the latest, while it knows no proxy."""
_QUEUED_FRAMES = 4
WARN_EVERY_S = 10.0
STILL_S = 5.0
"""An event loop that has not turned for so long, and did not run meanwhile, waits for something other than its work."""


class HeartbeatThread:
    """Keeps one node registered at every proxy from ``start`` until ``stop``, while ``pulse`` is called."""

    def __init__(
        self,
        node: NodeInfo,
        proxies: tuple[str, ...],
        secret: bytes | Secrets,
        *,
        heartbeat_s: float,
        stuck_s: float,
        load: Callable[[], NodeLoad],
        tell: Callable[[str, ProxyView | None], None],
    ) -> None:
        """``load``, and ``tell`` with a proxy and how it sees the node now, are called in the thread.

        The caller's own thread is the one that calls ``pulse``.

        ``tell`` gets None for a proxy that is forgotten. Raises ConfigError for an address that is none.
        """
        self._silence = Silence(min(STILL_S, stuck_s), stuck_s)
        self._loop_thread = threading.get_native_id()
        self._look_s = 2 * max(PULSE_S, heartbeat_s)
        self._tell = tell
        self._pulse_s = self._looked_s = time.monotonic()
        self._responsive = True
        self._stopping = False
        self._draining = self._met = False
        self._role: Role | None = None
        """The role that was announced last."""
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connections: dict[str, _ProxyConnection] = {}
        """The connections by the addresses of their proxies."""
        self._wanted = proxies
        """The addresses that proxies have now."""

        def connect(proxy: str) -> _ProxyConnection:
            return _ProxyConnection(self._context, node, proxy, secret, heartbeat_s, load, self._accepted_by)

        self._connect = connect
        try:
            for proxy in proxies:
                self._connections[proxy] = connect(proxy)
        except ConfigError:
            self._close()
            raise
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> Future[None]:
        """Begins. The future is done when the thread has let go of everything."""
        self._thread.start()
        return self._ended

    def pulse(self) -> None:
        """Tells the thread that the event loop turns."""
        self._pulse_s = time.monotonic()

    def announce(self, role: Role) -> None:
        """Tells every proxy the node's new role, at once."""
        self._role = role
        self._wake()

    def stop(self) -> None:
        """Says goodbye and ends, within ``GOODBYE_MS``."""
        self._stopping = True
        self._wake()

    def met(self) -> None:
        """Tells the proxies, at once, that the node has met those that it is to connect to."""
        self._met = True
        self._wake()

    def drain(self) -> None:
        """Tells the proxies, at once, that the node takes no new work."""
        self._draining = True
        self._wake()

    def follow(self, proxies: tuple[str, ...]) -> None:
        """Registers at the new ones of these addresses. Forgets the others when their proxies no longer answer."""
        self._wanted = proxies
        self._wake()

    def _wake(self) -> None:
        with self._wakeup_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        try:
            try:
                self._serve()
            finally:
                self._close()
        except Exception as exc:
            self._ended.set_exception(exc)
        else:
            self._ended.set_result(None)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        while not self._stopping:
            now = time.monotonic()
            self._look_at_loop(now)
            role = self._role
            self._connect_new()
            for connection in tuple(self._connections.values()):
                if role is not None:
                    connection.link.announce(role, now)
                if self._draining:
                    connection.link.drain(now)
                if self._met:
                    connection.link.met(now)
                connection.send_due(now, silent=not self._responsive)
                if (view := connection.changed()) is not None:
                    self._tell(connection.proxy, view)
                if connection.accepted or connection.proxy in self._wanted:
                    poller.register(connection.socket, connection.awaited)
                else:
                    self._forget(connection, poller)
            due_s = min((connection.link.due_s for connection in self._connections.values()), default=now + IDLE_S)
            ready = dict(poller.poll(max(0, int((due_s - time.monotonic()) * 1000) + 1)))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            for connection in self._connections.values():
                connection.receive(ready.get(connection.socket, 0), time.monotonic())
        for connection in self._connections.values():
            connection.say_goodbye()

    def _connect_new(self) -> None:
        for proxy in self._wanted:
            if proxy not in self._connections:
                log.info("there is a proxy at %s", proxy)
                self._connections[proxy] = self._connect(proxy)

    def _forget(self, connection: _ProxyConnection, poller: zmq.Poller) -> None:
        log.info("there is no proxy at %s any more", connection.proxy)
        with suppress(KeyError):
            poller.unregister(connection.socket)
        connection.socket.close(linger=0)
        del self._connections[connection.proxy]
        self._tell(connection.proxy, None)

    def _accepted_by(self) -> tuple[bytes, ...]:
        """Returns the boot ids of the proxies that know this node."""
        known = {connection.link.accepted_by for connection in self._connections.values()}
        return tuple(sorted(known - {b""})[:MAX_REPORTED_PROXIES])

    def _look_at_loop(self, now: float) -> None:
        # Where the system does not tell, the loop counts as running: it may have thousands of requests to do.
        motion = motion_of(os.getpid(), self._loop_thread) or Motion(0.0, wants_core=True)
        # A process that was stopped as a whole has not looked meanwhile: its loop gets another look.
        passed_s, self._looked_s = min(now - self._looked_s, self._look_s), now
        responsive = not self._silence.look(self._pulse_s, math.inf, motion, passed_s)
        if self._responsive and not responsive:
            log.error("the event loop has not turned for %.0f s: no heartbeats until it does", now - self._pulse_s)
        self._responsive = responsive

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close(linger=GOODBYE_MS)
        self._context.term()
        with self._wakeup_lock:
            os.close(self._wakeup)
            self._wakeup = -1


class _ProxyConnection:
    """The connection to one proxy."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        node: NodeInfo,
        proxy: str,
        secret: bytes | Secrets,
        heartbeat_s: float,
        load: Callable[[], NodeLoad],
        accepted_by: Callable[[], tuple[bytes, ...]],
    ) -> None:
        self.proxy = proxy
        self.link = ProxyLink(node, heartbeat_s, load, time.monotonic(), accepted_by)
        self._view: ProxyView | None = None
        self._boot_id = node.boot_id
        self._sealer = Sealer(secret, Purpose.DISCOVERY, node.boot_id)
        self._throttle = LogThrottle(WARN_EVERY_S)
        self._opener: Opener[FromProxy] = Opener(
            secret, Purpose.DISCOVERY, cast("type[FromProxy]", FromProxy), receiver=node.boot_id
        )
        self._sent = True
        self._refusal = ""
        self.socket = _connect(context, proxy, heartbeat_s)

    @property
    def accepted(self) -> bool:
        """Whether the proxy knew this node when ``changed`` was called last."""
        return self._view is not None and self._view.accepted

    @property
    def awaited(self) -> int:
        """The events to poll the socket for."""
        return zmq.POLLIN if self._sent else zmq.POLLIN | zmq.POLLOUT

    def send_due(self, now: float, *, silent: bool) -> None:
        """Sends what is due, unless ``silent``."""
        messages = self.link.tick(now)
        if messages and not silent:
            self._sent = False not in [self._send(message) for message in messages]

    def receive(self, ready: int, now: float) -> None:
        """Takes what has come, according to ``ready``."""
        if ready & zmq.POLLOUT:
            self.link.unsent(now)
        if ready & zmq.POLLIN:
            opened = self._opened(self.socket.recv_multipart(), now)
            if opened is not None:
                self.link.answered(opened, now)
                self._show_refusal()

    def say_goodbye(self) -> None:
        if self.link.knows_proxy:
            self._send(Deregister(self._boot_id))

    def changed(self) -> ProxyView | None:
        """Returns how the proxy sees the node if that has changed since the last call."""
        link = self.link
        before, view = self._view, ProxyView(link.status(connected=self._sent), link.known_role, link.to_meet)
        if view == before:
            return None
        self._view = view
        known, known_before = (seen is not None and seen.accepted for seen in (view, before))
        if known and not known_before:
            log.info("registered at proxy %s", self.proxy)
        elif known_before and not known:
            log.warning("proxy %s does not answer, or no longer knows this node", self.proxy)
        return view

    def _show_refusal(self) -> None:
        before, self._refusal = self._refusal, self.link.refusal
        if self._refusal and self._refusal != before:
            log.error("proxy %s refuses this node: %s", self.proxy, self._refusal)

    def _send(self, message: ToProxy) -> bool:
        """Sends the message if a connection can take it now: a frame that waits would only be too old later."""
        try:
            self.socket.send(self.link.seal(self._sealer, message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _opened(self, parts: list[bytes], now: float) -> Opened[FromProxy] | None:
        try:
            return self._opener.open_from(parts[-1])
        except WireError as exc:
            if count := self._throttle.add(now):
                log.warning("%d messages from proxy %s dropped, the last one because: %s", count, self.proxy, exc)
            return None


def _connect(context: zmq.Context[zmq.Socket[bytes]], proxy: str, heartbeat_s: float) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
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
        socket.close()
        raise ConfigError(f"proxy address {proxy!r} is not tcp://host:port: {exc}") from exc
    return socket


STUCK_S = 30.0
"""An event loop that has not turned for so long is taken for dead. Bursts of thousands of requests take seconds."""
PULSE_S = 1.0
"""The event loop shows at least this often that it turns."""
RESOLVE_S = 5.0
MEET_S = 2.0
"""A node that connects to others says after so long that it has met them: one that hangs keeps nobody waiting."""


class Registration:
    """Keeps one node registered at every proxy while ``run`` runs in an event loop that turns."""

    def __init__(
        self,
        node: NodeInfo,
        proxies: tuple[str, ...],
        secret: bytes | Secrets,
        heartbeat_ms: int,
        load: Callable[[], NodeLoad],
        stuck_s: float = STUCK_S,
        resolve_s: float = RESOLVE_S,
        look_up: LookUp = look_up,
        meet: Callable[[Sequence[PrefillTarget], Callable[[], None]], None] = lambda _, met: met(),
        meet_s: float = MEET_S,
    ) -> None:
        """``proxies`` are control addresses, ``tcp://host:port``. The host may be a name of several proxies.

        ``load`` is called for every heartbeat, in another thread. Names are looked up every ``resolve_s``.
        ``meet`` connects to the nodes that proxies name, and calls its second argument when it has. The node waits
        for that for ``meet_s``.
        """
        self._node = node
        self._proxies = tuple(dict.fromkeys(proxies))
        self._secret = secret
        self._heartbeat_s = heartbeat_ms / 1000
        self._load = load
        self._stuck_s = stuck_s
        self._thread: HeartbeatThread | None = None
        """The thread that talks to the proxies, while ``run`` runs."""
        self._resolve_s = resolve_s
        self._look_up = look_up
        self._names: ProxyNames | None = None
        """What follows the names of proxies, while ``run`` runs."""
        self._addresses = tuple(proxy for proxy in self._proxies if not is_name(proxy))
        self._registered = {proxy: asyncio.Event() for proxy in self._addresses}
        self._views = dict.fromkeys(self._addresses, ProxyView(RegistrationStatus.SILENT))
        self._news = asyncio.Event()
        """Set whenever a proxy sees the node in another way."""
        self._meet, self._meet_s = meet, meet_s
        self._to_meet: tuple[PrefillTarget, ...] = ()
        self._met = self._was_ready = False
        self._give_up: asyncio.TimerHandle | None = None
        """Ends the first meeting if that takes too long."""

    @property
    def registered(self) -> Mapping[str, asyncio.Event]:
        """An event for each proxy, by its address. It is set while that proxy knows this node.

        A proxy that is given by name is here as soon as its address is known.
        """
        return MappingProxyType(self._registered)

    @property
    def unaccepted(self) -> str | None:
        """Why no proxy has this node, in words. It is None if one has, or if there is none to register at."""
        if not self._proxies or any(event.is_set() for event in self._registered.values()):
            return None
        reasons = [f"{proxy} {view.status.value}" for proxy, view in self._views.items()]
        if self._names is not None:
            reasons += self._names.failures
        return f"no proxy has accepted this node: {'; '.join(reasons) or 'no address of one is known yet'}"

    @property
    def connecting(self) -> bool:
        """Whether this node connects to others, for the first time, and was not ready before."""
        return bool(self._to_meet) and not self._met and not self._was_ready

    def drain(self) -> None:
        """Tells the proxies, at once, that this node takes no new work, so that what runs here moves to other nodes."""
        if self._thread is not None:
            self._thread.drain()

    async def announce(self, role: Role, timeout_s: float) -> tuple[str, ...]:
        """Tells every proxy the node's new role, and waits until those that know the node have taken it.

        Returns the proxies that have not within ``timeout_s``. They get the role with the next heartbeat that reaches
        them, or with the node's registration.
        """
        self._node = msgspec.structs.replace(self._node, role=role)
        if self._thread is not None:
            self._thread.announce(role)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(view.accepted and view.role is not role for view in self._views.values()):
                    self._news.clear()
                    await self._news.wait()
        return tuple(proxy for proxy, view in self._views.items() if view.role is not role)

    async def run(self) -> None:
        """Registers and sends heartbeats until it is cancelled, and then says goodbye, within ``GOODBYE_MS``.

        Returns at once if there is no proxy to register at.

        Raises ConfigError for an address that is none.
        """
        if not self._proxies:
            return
        loop = asyncio.get_running_loop()

        def tell(proxy: str, view: ProxyView | None) -> None:
            loop.call_soon_threadsafe(self._show, proxy, view)

        thread = HeartbeatThread(
            self._node,
            self._addresses,
            self._secret,
            heartbeat_s=self._heartbeat_s,
            stuck_s=self._stuck_s,
            load=self._load,
            tell=tell,
        )
        names = ProxyNames(self._proxies, self._resolve_s, thread.follow, self._look_up)
        ended = asyncio.wrap_future(thread.start())
        self._thread, self._names = thread, names
        try:
            names.start()
            while not ended.done():
                thread.pulse()
                await asyncio.wait([ended], timeout=min(self._heartbeat_s, self._stuck_s / 4, PULSE_S))
            ended.result()
        finally:
            if self._give_up is not None:
                self._give_up.cancel()
            self._thread = self._names = None
            names.stop()
            thread.stop()
            await asyncio.wait([ended])
            for proxy in tuple(self._views):
                self._show(proxy, ProxyView(RegistrationStatus.SILENT) if proxy in self._addresses else None)

    def _show(self, proxy: str, view: ProxyView | None) -> None:
        """Takes how ``proxy`` sees the node; None if the node has forgotten that proxy."""
        self._news.set()
        registered = self._registered.setdefault(proxy, asyncio.Event())
        anew = not registered.is_set()
        if view is not None and view.accepted:
            registered.set()
        else:
            registered.clear()
        if view is None:
            del self._registered[proxy]
            self._views.pop(proxy, None)
        else:
            self._views[proxy] = view
            self._meet_new(anew=anew and view.accepted)
            self._was_ready |= view.accepted and not self.connecting

    def _meet_new(self, *, anew: bool) -> None:
        """Has the node connect to those that its proxies name, if they are others than at the last call.

        It also does if a proxy has taken it ``anew``: it may have been cut off, and not only from that proxy.
        """
        accepting = (view for view in self._views.values() if view.accepted)
        to_meet = tuple({node.boot_id: node for view in accepting for node in view.to_meet}.values())
        if to_meet == self._to_meet and not anew:
            return
        self._to_meet = to_meet
        if not to_meet:
            return
        if not self._met and self._give_up is None:
            self._give_up = asyncio.get_running_loop().call_later(self._meet_s, self._have_met)
        self._meet(to_meet, self._have_met)

    def _have_met(self) -> None:
        if self._met:
            return
        self._met = True
        if self._give_up is not None:
            self._give_up.cancel()
        if self._thread is not None:
            self._thread.met()
