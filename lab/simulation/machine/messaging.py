"""ZMQ's sockets as the product uses them, between simulated processes: PAIR, DEALER, ROUTER, monitors and pollers.

What is simulated is the contract: whole messages in order, routes that the ROUTER or its client chooses, reconnection,
high-water marks at which a sender that does not wait gets ``Again``, and the events of a monitor.
"""

from __future__ import annotations

import asyncio
import errno
import struct
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import zmq

from lab.simulation.machine.network import Address, End, Network
from lab.simulation.machine.virtual_time import SimProcess, SimThread, present_process, present_thread

RECONNECT_S = 0.1
FLUSH_STEP_S = 0.001
# As plain numbers: operations on enum members take longer.
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_NO_LIMIT = 1_000_000


class Pollable:
    """Something that becomes readable. Threads, readers of the event loop and coroutines may wait for it."""

    number: int

    def __init__(self) -> None:
        self._threads: dict[SimThread, None] = {}
        self._futures: list[asyncio.Future[None]] = []

    def events(self) -> int:
        raise NotImplementedError

    def watch(self, thread: SimThread) -> None:
        self._threads[thread] = None

    def unwatch(self, thread: SimThread) -> None:
        self._threads.pop(thread, None)

    def notify(self) -> None:
        for thread in list(self._threads):
            thread.wake()
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    async def wait_async(self, timeout_s: float | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            pass
        finally:
            if future in self._futures:
                self._futures.remove(future)


class EventFd(Pollable):
    """An eventfd."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.value = 0

    def events(self) -> int:
        return POLLIN if self.value else 0

    def write(self) -> None:
        self.value += 1
        self.notify()

    def read(self) -> int:
        if not self.value:
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        value, self.value = self.value, 0
        return value


class PidFd(Pollable):
    """A descriptor that is readable once a process has ended."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__()
        self._process = process
        process.on_end[self.notify] = None

    def events(self) -> int:
        return POLLIN if self._process.ended else 0


class Descriptors:
    """The descriptors of all simulated processes."""

    def __init__(self) -> None:
        self._next = 1_000_000
        self.open: dict[int, Pollable] = {}

    def eventfd(self) -> int:
        self._next += 1
        self.open[self._next] = EventFd(self._next)
        return self._next

    def add(self, pollable: Pollable) -> int:
        self._next += 1
        self.open[self._next] = pollable
        return self._next

    def close(self, number: int) -> None:
        del self.open[number]

    def __contains__(self, number: object) -> bool:
        return number in self.open

    def fd(self, number: int) -> EventFd:
        found = self.open[number]
        assert isinstance(found, EventFd)
        return found


class SimFrame:
    """A part of a received message."""

    def __init__(self, data: bytes, more: bool, connection: int) -> None:
        self.bytes = data
        self.more = more
        self._connection = connection

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        return self._connection


class SimZmqSocket(Pollable):
    """A socket of ZMQ."""

    def __init__(self, context: SimContext, kind: int) -> None:
        super().__init__()
        self._context = context
        self._network = context.network
        self._process = present_process()
        self._kind = kind
        self._options: dict[int, Any] = {}
        self._inbox: deque[tuple[list[bytes], int]] = deque()
        self._parts: deque[SimFrame] = deque()
        self._routes: dict[bytes, End] = {}
        self._next_route = 0
        self._unsent: deque[list[bytes]] = deque()
        self._end: End | None = None
        self._address: Address | None = None
        self._endpoint = b""
        self._monitor: SimMonitor | None = None
        self._unlisten: Callable[[], None] | None = None
        self.number = context.descriptors.add(self)
        self.closed = False
        self.linger = self.sndhwm = self.rcvhwm = 0
        context.sockets[self] = None

    # ------------------------------------------------------------ options

    def set(self, option: int, value: Any) -> None:
        self._options[option] = value

    setsockopt = set

    def get(self, option: int) -> Any:
        if option == zmq.LAST_ENDPOINT:
            return self._endpoint
        if option == zmq.RCVMORE:
            return int(bool(self._parts))
        if option == zmq.FD:
            return self.number
        return self._options.get(option, 0)

    getsockopt = get

    def get_string(self, option: int) -> str:
        return str(self.get(option).decode())

    @property
    def underlying(self) -> SimZmqSocket:
        return self

    # ------------------------------------------------------------ connections

    @property
    def routes(self) -> Collection[bytes]:
        """The routes of a ROUTER's connections."""
        return self._routes

    def bind(self, address: str) -> None:
        where = _parsed(address, self._process, self._network)
        try:
            self._unlisten = self._network.listen(self._process, where, self._accept)
        except OSError as exc:
            raise zmq.ZMQError(zmq.EADDRINUSE) from exc
        self._endpoint = address.encode() if address.startswith("ipc") else f"tcp://{where[0]}:{where[1]}".encode()

    def connect(self, address: str) -> None:
        self._address = _parsed(address, self._process, self._network)
        self._dial()

    def _dial(self) -> None:
        if self.closed or self._address is None or not self._process.running:
            return
        attempt = object()
        self._attempt = attempt

        def established(end: End) -> None:
            if self.closed or self._attempt is not attempt:
                end.reset()
                return
            self._attempt = object()
            self._end = end
            self._take(end, b"")
            self._watch_silence(end)
            while self._unsent:
                end.send(self._unsent.popleft())
            self.notify()

        def refused() -> None:
            if self._attempt is attempt:
                self._attempt = object()
                self._retry(zmq.EVENT_CONNECT_RETRIED)

        self._network.dial(self._process, self._address, established, refused, self._options.get(zmq.IDENTITY, b""))
        limit_ms = self._options.get(zmq.CONNECT_TIMEOUT) or 60_000
        self._network.loop.call_later(limit_ms / 1000, refused, context=self._process.context)

    def _retry(self, event: int) -> None:
        if self.closed:
            return
        self._tell_monitor(event, self.number)
        wait_s = (self._options.get(zmq.RECONNECT_IVL) or 1000 * RECONNECT_S) / 1000
        self._network.loop.call_later(wait_s, self._dial, context=self._process.context)

    def _accept(self, end: End) -> None:
        route = b""
        if self._kind == zmq.ROUTER:
            self._next_route += 1
            route = end.peer.greeting or b"\0" + struct.pack(">I", self._next_route)
            if route in self._routes:
                end.reset()
                return
            self._routes[route] = end
        else:
            self._end = end
            while self._unsent:
                end.send(self._unsent.popleft())
        self._take(end, route)
        self._tell_monitor(zmq.EVENT_ACCEPTED, end.number)

    def _take(self, end: End, route: bytes) -> None:
        def received(parts: list[bytes]) -> None:
            self._inbox.append(([route, *parts] if route else parts, end.number))
            self._came()

        def lost() -> None:
            if self.closed:
                return
            if route:
                del self._routes[route]
                self._tell_monitor(zmq.EVENT_DISCONNECTED, end.number)
                return
            self._end = None
            if self._address is None:
                self._tell_monitor(zmq.EVENT_DISCONNECTED, end.number)
            else:
                self._retry(zmq.EVENT_DISCONNECTED)

        end.receive, end.lost = received, lost

    def _watch_silence(self, end: End) -> None:
        """Ends a connection over which ZMTP's pings get no answer."""
        timeout_ms = self._options.get(zmq.HEARTBEAT_TIMEOUT)
        if not timeout_ms:
            return
        hosts = (end.process.host, end.peer.process.host)

        def check() -> None:
            blocked = [since for pair in (hosts, hosts[::-1]) if (since := self._network.blocked.get(pair)) is not None]
            if not end.open:
                self._network.on_block.pop(blocks, None)
            elif blocked and self._network.loop.time() - min(blocked) >= timeout_ms / 1000 - 1e-9:
                self._network.on_block.pop(blocks, None)
                end.reset()
                end.lost()

        def blocks() -> None:
            self._network.loop.call_later(timeout_ms / 1000, check, context=self._process.context)

        self._network.on_block[blocks] = None
        blocks()

    # ------------------------------------------------------------ messages

    def send(self, data: bytes, flags: int = 0) -> None:
        self.send_multipart([data], flags)

    def send_multipart(self, parts: Sequence[bytes], flags: int = 0) -> Any:
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        message = [bytes(part) for part in parts]
        if self._kind == zmq.ROUTER:
            end = self._routes.get(message[0])
            if self._options.get(zmq.ROUTER_MANDATORY):
                self._check_room(end)
            if end is not None:
                end.send(message[1:])
            return None
        if self._end is not None:
            self._end.send(message)
            return None
        limit = self._options.get(zmq.SNDHWM, 1000) or _NO_LIMIT
        if self._options.get(zmq.IMMEDIATE) or len(self._unsent) >= limit:
            raise zmq.Again
        self._unsent.append(message)
        return None

    def _check_room(self, end: End | None) -> None:
        """Raises what a ROUTER does that must not lose a message unseen: there is no such route, or it is full."""
        if end is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if end.underway >= (self._options.get(zmq.SNDHWM, 1000) or _NO_LIMIT):
            raise zmq.Again

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if not (self._parts or self._inbox or flags & zmq.NOBLOCK):
            self.poll()
        if not self._parts:
            parts, connection = self._pop()
            last = len(parts) - 1
            self._parts.extend(SimFrame(part, i < last, connection) for i, part in enumerate(parts))
        frame = self._parts.popleft()
        return frame.bytes if copy else frame

    def recv_multipart(self, flags: int = 0) -> Any:
        return self._pop()[0]

    def _pop(self) -> tuple[list[bytes], int]:
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def _came(self) -> None:
        self.notify()
        reader = self._network.loop.readers.get(self.number)
        if reader is not None:
            reader()

    def events(self) -> int:
        readable = POLLIN if self._inbox or self._parts else 0
        return readable | (POLLOUT if self._end is not None or self._kind == zmq.ROUTER else 0)

    def poll(self, timeout: float | None = None, flags: int = POLLIN) -> Any:
        poller = SimPoller()
        poller.register(self, flags)
        return dict(poller.poll(timeout)).get(self, 0)

    # ------------------------------------------------------------ monitors

    def get_monitor_socket(self, events: int) -> SimMonitor:
        self._monitor = type(self).monitor_type()(self._context, events)
        return self._monitor

    @staticmethod
    def monitor_type() -> type[SimMonitor]:
        return SimMonitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def _tell_monitor(self, event: int, value: int) -> None:
        if self._monitor is not None:
            self._monitor.tell(event, value)

    # ------------------------------------------------------------ the end

    def flush(self, within_s: float) -> None:
        """Waits until all that was sent has arrived, ``within_s`` at most, as the end of a ZMQ context does."""
        thread = present_thread()
        until = thread.now() + within_s
        while (self._unsent or (self._end is not None and self._end.underway)) and thread.now() < until:
            thread.block(FLUSH_STEP_S)

    def close(self, linger: float | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        self._context.sockets.pop(self, None)
        self._context.descriptors.close(self.number)
        if self._unlisten is not None:
            self._unlisten()
        for end in [*self._routes.values(), *([self._end] if self._end is not None else [])]:
            end.reset()
        self._routes.clear()
        self._end = None
        self.notify()


class SimMonitor(SimZmqSocket):
    """The PAIR on which a socket's events come."""

    def __init__(self, context: SimContext, wanted: int) -> None:
        super().__init__(context, zmq.PAIR)
        self._wanted = wanted

    def tell(self, event: int, value: int) -> None:
        if event & self._wanted and not self.closed:
            self._inbox.append(([struct.pack("=hi", event if event < 2**15 else 0, value), b""], 0))
            self._came()


class SimAsyncSocket(SimZmqSocket):
    """A socket of ``zmq.asyncio``."""

    @staticmethod
    def monitor_type() -> type[SimMonitor]:
        return SimAsyncMonitor

    def poll(self, timeout: float | None = None, flags: int = POLLIN) -> Any:
        return _poll_async(self, timeout, flags)

    async def send(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        SimZmqSocket.send_multipart(self, [data], flags)

    async def send_multipart(self, parts: Sequence[bytes], flags: int = 0) -> Any:
        SimZmqSocket.send_multipart(self, parts, flags)

    async def recv(self, flags: int = 0, copy: bool = True) -> Any:
        (data,) = await self.recv_multipart()
        return data

    async def recv_multipart(self, flags: int = 0) -> Any:
        while not self._inbox:
            await self.wait_async(None)
        return self._pop()[0]


class SimShadow:
    """A socket of ``zmq.asyncio`` as one that does not wait, from which code reads."""

    def __init__(self, socket: SimZmqSocket) -> None:
        self._socket = socket

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        return SimZmqSocket.recv(self._socket, flags, copy)


class SimAsyncMonitor(SimMonitor):
    def poll(self, timeout: float | None = None, flags: int = POLLIN) -> Any:
        return _poll_async(self, timeout, flags)

    async def recv_multipart(self, flags: int = 0) -> Any:
        return self._pop()[0]


async def _poll_async(polled: SimZmqSocket, timeout_ms: float | None, flags: int) -> int:
    if not polled.events() & flags and (timeout_ms is None or timeout_ms > 0):
        await polled.wait_async(None if timeout_ms is None else timeout_ms / 1000)
    return polled.events() & flags


class SimContext:
    """A context of ZMQ, of one process."""

    network: Network
    descriptors: Descriptors
    socket_type: type[SimZmqSocket] = SimZmqSocket

    def __init__(self) -> None:
        self.sockets: dict[SimZmqSocket, None] = {}
        self.process = present_process()

    def socket(self, kind: int) -> SimZmqSocket:
        return self.socket_type(self, kind)

    def term(self) -> None:
        if not SimThread.over:
            assert not self.sockets, f"{self.process.name} ends a context with {len(self.sockets)} open sockets"

    def __enter__(self) -> SimContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.term()


class SimAsyncContext(SimContext):
    socket_type = SimAsyncSocket


class SimPoller:
    """``zmq.Poller``, on sockets and descriptors."""

    descriptors: Descriptors

    def __init__(self) -> None:
        self._registered: dict[Any, tuple[Pollable, int]] = {}

    def register(self, pollable: Any, flags: int) -> None:
        self._registered[pollable] = self._pollable(pollable), int(flags)

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        ready = self._ready()
        if ready or timeout == 0:
            return ready
        thread = present_thread()
        loop = thread._loop
        until = None if timeout is None or timeout < 0 else loop.time() + timeout / 1000
        watched = [pollable for pollable, _ in self._registered.values()]
        for pollable in watched:
            pollable.watch(thread)
        try:
            while not ready and (until is None or loop.time() < until):
                thread.block(None if until is None else until - loop.time())
                ready = self._ready()
        finally:
            for pollable in watched:
                pollable.unwatch(thread)
        return ready

    def _pollable(self, registered: Any) -> Pollable:
        return self.descriptors.open[registered] if isinstance(registered, int) else registered

    def _ready(self) -> list[tuple[Any, int]]:
        return [
            (registered, events)
            for registered, (pollable, flags) in self._registered.items()
            if (events := pollable.events() & flags)
        ]


def select_sockets(readable: Sequence[Any], writable: Sequence[Any], failed: Sequence[Any], timeout: float) -> None:
    """Does what ``zmq.select`` does for sockets that are to be read, for callers that look themselves."""
    assert not writable and not failed
    poller = SimPoller()
    for socket in readable:
        poller.register(socket, POLLIN)
    poller.poll(timeout * 1000)


def _parsed(address: str, process: SimProcess, network: Network) -> Address:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return process.host, rest
    host, _, port = rest.rpartition(":")
    if port in ("*", "0"):
        used = {number for name, number in network.listeners if name == host}
        return host, next(n for n in range(40_000, 60_000) if n not in used)
    return host, int(port)
