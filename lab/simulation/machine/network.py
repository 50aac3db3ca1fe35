"""The network between simulated processes: connections whose bytes and messages come in order, after seeded delays.

The direction from one host to another may be blocked. What was sent meanwhile comes when it is open again, as TCP
repeats what is lost. A process that ends resets its connections.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self, TypeAlias

from lab.simulation.machine.virtual_time import PROCESS, SimLoop, SimProcess, present_process

Address: TypeAlias = tuple[str, int | str]
"""The host and the port, or the path of a socket of this host."""

LOCAL_DELAY_S = 20e-6
WINDOW_BYTES = 256 * 1024
"""How many bytes of one direction the kernels of both sides take."""
BUFFER_BYTES = 64 * 1024
"""How many more bytes a program may write before it is told to wait."""


LAG_S = 1.0
SPOILT_SHARE = 0.3
"""The part of a host's messages that are spoilt while the fault lasts."""


class Spoilt(enum.Enum):
    """What may happen to a message between hosts. TCP does none of it: proxies, tunnels and broken memory do."""

    TWICE = "twice"
    SHORT = "short"
    ALTERED = "altered"

    def of(self, parts: list[bytes], random: Random) -> tuple[list[bytes], ...]:
        """Returns what arrives."""
        if self is Spoilt.TWICE or not parts[-1]:
            return parts, list(parts)
        place = random.randrange(len(parts[-1]))
        head, rest = parts[-1][:place], parts[-1][place:]
        last = head if self is Spoilt.SHORT else head + bytes([rest[0] ^ 1]) + rest[1:]
        return ([*parts[:-1], last],)


class Reset:
    """The last item of a connection whose other side is gone."""


class EndOfStream:
    """The last item of a direction that was closed in good order."""


FIRST_SOCKET = 2_000_000
"""The number of the first connection's socket."""
FIRST_SHARED_SOCKET = 3_000_000
NO_NUMBER = 0
"""The number of a connection that its process has not taken yet."""
RESET, EOF = Reset(), EndOfStream()


@dataclass(slots=True, eq=False)
class Flow:
    """One direction of a connection."""

    network: Network
    source: SimProcess
    target: SimProcess
    arrive: Callable[[Any], None]
    _items: deque[tuple[float, Any]] = field(default_factory=deque)
    _last_s: float = 0.0

    def send(self, item: object) -> None:
        network = self.network
        delay_s = network.delay(self.source.host, self.target.host)
        if network.lagging:
            delay_s += network.lag(self)
        self._last_s = max(self._last_s, network.loop.time() + delay_s)
        self._items.append((self._last_s, item))
        network.loop.call_at(self._last_s, self._deliver, context=self.target.context)

    def _deliver(self) -> None:
        """Delivers what is due, unless the way is blocked; then ``Network.open`` calls again."""
        if PROCESS.get() is not self.target:  # a process has taken the connection meanwhile
            self.again()
            return
        if self.network.is_blocked(self.source.host, self.target.host):
            self.network.waiting[self] = None
            return
        now = self.network.loop.time()
        while self._items and self._items[0][0] <= now:
            item = self._items.popleft()[1]
            self.network.loop.events.delivered(self.source.name, self.target.name, _summary(item))
            self.arrive(item)

    @property
    def underway(self) -> int:
        """The items that the other side has not got yet. A process that is stopped gets none."""
        return len(self._items)

    def again(self) -> None:
        self.network.loop.call_soon(self._deliver, context=self.target.context)


def _summary(item: object) -> bytes:
    match item:
        case list():
            return b" ".join(item)
        case (bytes() as piece, SimTransport()):
            # Only the length: uvicorn's Date header has the real time.
            return b"%d bytes" % len(piece)
        case _:
            return type(item).__name__.encode()


class End:
    """One process's end of a connection."""

    peer: End

    def __init__(self, network: Network, process: SimProcess, number: int) -> None:
        self.network = network
        self.process = process
        self.number = number
        self.greeting = b""
        """What the other side learns as soon as it has accepted the connection."""
        self.open = True
        self.early: list[object] = []
        """What came before the connection was established here: the other side knows of it sooner."""
        self.receive: Callable[[Any], None] = self.early.append
        self.lost: Callable[[], None] = lambda: None
        process.on_end[self.reset] = None

    def join(self, peer: End) -> None:
        self.peer = peer
        self._flow = Flow(self.network, self.process, peer.process, peer._arrived)

    def take_number(self) -> None:
        self.number = self.network.new_number(self.process)

    def give_number_back(self) -> None:
        self.network.numbers[self.process].discard(self.number)

    def pass_to(self, process: SimProcess) -> None:
        """Gives this end to the process that accepts the connection."""
        self.give_number_back()
        self.process.on_end.pop(self.reset, None)
        self.process = process
        self.take_number()
        process.on_end[self.reset] = None
        self._flow.source = self.peer._flow.target = process

    @property
    def underway(self) -> int:
        """The items that were sent and have not arrived."""
        return self._flow.underway

    def send(self, item: object) -> None:
        self.process.step()
        if not self.open:
            return
        for piece in self.network.spoilt(self, item):
            self._flow.send(piece)

    def reset(self) -> None:
        """Closes this end. The other one hears of it."""
        if self.open:
            self._flow.send(RESET)
            self.forget()

    def break_off(self) -> None:
        """Closes this end as if the other one had."""
        if self.open:
            self.reset()
            self.lost()

    def forget(self) -> None:
        """Closes this end without a word."""
        self.open = False
        self.process.on_end.pop(self.reset, None)
        self.network.ends.pop(self, None)
        self.give_number_back()

    def _arrived(self, item: object) -> None:
        if not self.open:
            if item is not RESET and self.peer.open:
                self._flow.send(RESET)
            return
        if item is RESET:
            self.forget()
            self.lost()
        else:
            self.receive(item)


@dataclass(frozen=True, slots=True, eq=False)
class Listener:
    """A process that takes connections."""

    process: SimProcess
    accept: Callable[[End], None]

    def meet(self, near: End) -> None:
        """Takes a connection. The kernel accepts, even if the process is stopped."""
        far = near.network.end_of(self.process, NO_NUMBER)
        near.join(far)
        far.join(near)
        near.network.loop.call_soon(self._take, far, context=self.process.context)

    def _take(self, far: End) -> None:
        """The process gives the connection a number. By then, that of one which has ended may be free."""
        if far.open:
            far.take_number()
        self.accept(far)


class SharedSocket:
    """One of several listening sockets on a port. It is there as long as a process holds it.

    Connections wait in it until the process that serves on it takes them, or that one's successor.
    """

    def __init__(self, network: Network, port: SharedPort) -> None:
        self.network = network
        self.port = port
        self._holders: dict[SimProcess, Callable[[], None]] = {}
        self._listener: Listener | None = None
        self._waiting: deque[tuple[End, list[Any]]] = deque()
        """The connections that wait, with what has come over them."""

    def hold(self, process: SimProcess) -> None:
        """Gives a process the socket."""

        def let_go() -> None:
            self.let_go(process)

        self._holders[process] = let_go
        process.on_end[let_go] = None

    def let_go(self, process: SimProcess) -> None:
        """Takes the socket from a process. The last one closes it, and breaks the connections that wait."""
        let_go = self._holders.pop(process, None)
        if let_go is None:
            return
        process.on_end.pop(let_go, None)
        if self._listener is not None and self._listener.process is process:
            self._listener = None
        if not self._holders:
            self.port.close(self)
            for far, _ in self._waiting:
                far.reset()
            self._waiting.clear()

    def serve(self, listener: Listener) -> None:
        """Lets a process that holds the socket take the connections."""
        assert listener.process in self._holders, f"{listener.process.name} has not inherited the socket"
        self._listener = listener
        self._tell()

    def meet(self, near: End) -> None:
        """Takes a connection."""
        far = self.network.end_of(self.network.kernel(self.port.address[0]))
        near.join(far)
        far.join(near)
        came: list[Any] = []
        far.receive = came.append
        self._waiting.append((far, came))
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self.network.loop.call_soon(self._accept, self._listener, context=self._listener.process.context)

    def _accept(self, listener: Listener) -> None:
        while self._waiting and self._listener is listener:
            far, came = self._waiting.popleft()
            if not far.open:
                continue
            far.pass_to(listener.process)
            listener.accept(far)
            for item in came:
                far.receive(item)


class SharedPort:
    """A port on which several sockets listen. The kernel gives each new connection to one of them."""

    def __init__(self, network: Network, address: tuple[str, int]) -> None:
        self.network = network
        self.address = address
        self.sockets: list[SharedSocket] = []

    def meet(self, near: End) -> None:
        self.network.random.choice(self.sockets).meet(near)

    def close(self, socket: SharedSocket) -> None:
        """Takes out a socket that nobody holds any more."""
        self.sockets.remove(socket)
        if not self.sockets:
            del self.network.listeners[self.address]


class Network:
    """All hosts' addresses, and the delays and blocks between them."""

    def __init__(self, loop: SimLoop, random: Random, *, delay_s: float) -> None:
        self.loop = loop
        self.random = random
        self.delay_s = delay_s
        """The mean of the delays between hosts."""
        self.listeners: dict[Address, Listener | SharedPort] = {}
        self.shared: dict[int, SharedSocket] = {}
        """All sockets that several processes may hold, by their descriptors."""
        self.waiting: dict[Flow, None] = {}
        self.blocked: dict[tuple[str, str], float] = {}
        """When each direction was blocked."""
        self._blocks: Counter[tuple[str, str]] = Counter()
        self.numbers: dict[SimProcess, set[int]] = {}
        self._kernels: dict[str, SimProcess] = {}
        self.on_block: dict[Callable[[], None], None] = {}
        self.transports: list[SimTransport] = []
        """All connections that there were, in the order of their sockets' numbers."""
        self.window_bytes = WINDOW_BYTES
        self.buffer_bytes = BUFFER_BYTES
        self.lagging: set[str] = set()
        """The hosts each of whose connections has a delay of its own."""
        self._lags: dict[Flow, float] = {}
        self.ends: dict[End, None] = {}
        """The open ends of all connections."""
        self.spoilers: set[tuple[str, Spoilt]] = set()
        """What happens to messages of a host that go to others."""
        loop.connect, loop.serve = self._connect, self._serve

    def delay(self, source: str, target: str) -> float:
        if source == target:
            return LOCAL_DELAY_S
        return self.delay_s * (0.5 + self.random.expovariate(2.0))

    def reset(self, host: str) -> None:
        """Breaks all connections between this host and others."""
        for end in [end for end in self.ends if end.process.host == host and end.peer.process.host != host]:
            self.loop.call_soon(end.break_off, context=end.process.context)

    def forget(self, host: str) -> None:
        """Ends all connections between this host and others, at this host alone."""
        for end in [end for end in self.ends if end.process.host == host and end.peer.process.host != host]:
            end.forget()

    def lag(self, flow: Flow) -> float:
        """Returns by how much longer this connection takes than others. No way within a host is slower."""
        hosts = {flow.source.host, flow.target.host}
        if len(hosts) == 1 or not self.lagging & hosts:
            return 0.0
        if flow not in self._lags:
            self._lags[flow] = self.random.uniform(0.0, LAG_S)
        return self._lags[flow]

    def spoilt(self, end: End, item: object) -> Sequence[object]:
        """Returns what arrives in place of a message."""
        host = end.process.host
        if not self.spoilers or not isinstance(item, list) or end.peer.process.host == host:
            return (item,)
        for kind in Spoilt:
            if (host, kind) in self.spoilers and self.random.random() < SPOILT_SHARE:
                return kind.of(item, self.random)
        return (item,)

    def is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self.blocked

    def block(self, source: str, target: str) -> None:
        """Blocks a direction until ``open`` has been called as often."""
        self._blocks[source, target] += 1
        self.blocked.setdefault((source, target), self.loop.time())
        for action in list(self.on_block):
            action()

    def open(self, source: str, target: str) -> None:
        self._blocks[source, target] -= 1
        if self._blocks[source, target]:
            return
        del self.blocked[source, target]
        for flow in [flow for flow in self.waiting if (flow.source.host, flow.target.host) == (source, target)]:
            del self.waiting[flow]
            flow.again()

    def unread_bytes(self, socket_number: int) -> int:
        """Returns how many bytes the kernels have that a program has written to this socket."""
        return self.transports[socket_number - FIRST_SOCKET].unread_bytes

    def listen(self, process: SimProcess, address: Address, accept: Callable[[End], None]) -> Callable[[], None]:
        """Takes connections for the process. Returns what ends that. Raises OSError if the address is in use."""
        if process.ended:
            return lambda: None
        if address in self.listeners:
            raise OSError(errno.EADDRINUSE, f"{address} is in use")
        self.listeners[address] = Listener(process, accept)

        def close() -> None:
            self.listeners.pop(address, None)
            process.on_end.pop(close, None)

        process.on_end[close] = None
        return close

    def dial(
        self,
        process: SimProcess,
        address: Address,
        established: Callable[[End], None],
        refused: Callable[[], None],
        greeting: bytes = b"",
    ) -> None:
        """Connects the process to an address. One of the two functions is called, unless a block lasts for ever.

        The other side learns ``greeting``.
        """
        process.step()
        if process.ended:
            return
        kernel = self.kernel(str(address[0]))

        def answer() -> None:
            listener = self.listeners.get(address)
            if listener is None:
                Flow(self, kernel, process, lambda _: refused()).send(None)
                return
            near = self.end_of(process)
            near.greeting = greeting
            listener.meet(near)
            Flow(self, kernel, process, lambda _: establish(near)).send(None)

        def establish(near: End) -> None:
            if not near.open:  # the other process has ended meanwhile
                refused()
                return
            established(near)
            for item in tuple(near.early):
                near.receive(item)

        Flow(self, process, kernel, lambda _: answer()).send(None)

    def share(self, process: SimProcess, host: str, port: int, count: int) -> list[SharedListener]:
        """Returns ``count`` listening sockets on one port. Raises OSError if the address is in use."""
        address = (host, port)
        if address in self.listeners:
            raise OSError(errno.EADDRINUSE, f"{address} is in use")
        shared = self.listeners[address] = SharedPort(self, address)
        made = []
        for _ in range(count):
            number = FIRST_SHARED_SOCKET + len(self.shared)
            self.shared[number] = SharedSocket(self, shared)
            shared.sockets.append(self.shared[number])
            self.shared[number].hold(process)
            made.append(SharedListener(self.shared[number], number, process))
        return made

    def inherited(self, fileno: int) -> SharedListener:
        """Returns the socket that the present process has inherited with this number."""
        return SharedListener(self.shared[fileno], fileno, present_process())

    def kernel(self, host: str) -> SimProcess:
        """Returns what answers at a host whatever its processes do."""
        if host not in self._kernels:
            self._kernels[host] = SimProcess(self.loop, f"kernel of {host}", host)
        return self._kernels[host]

    def end_of(self, process: SimProcess, number: int | None = None) -> End:
        """Returns a new end of a connection, with this number or a new one."""
        end = End(self, process, self.new_number(process) if number is None else number)
        self.ends[end] = None
        return end

    def new_number(self, process: SimProcess) -> int:
        """Returns a connection's number. As a kernel does, this gives a number again as soon as it is free."""
        used = self.numbers.setdefault(process, set())
        number = next(n for n in range(10, 100_000) if n not in used)
        used.add(number)
        return number

    # ------------------------------------------------------------ asyncio's side

    async def _connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[SimTransport, Any]:
        process, ready = present_process(), self.loop.create_future()

        def established(end: End) -> None:
            if ready.done():  # the caller has given up
                end.reset()
                return
            # At once: what comes next, an end included, may come before the caller goes on.
            protocol = factory()
            transport = SimTransport(self.loop, end, protocol, (process.host, end.number), (host, port))
            protocol.connection_made(transport)
            ready.set_result((transport, protocol))

        def refused() -> None:
            if not ready.done():
                ready.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, f"{host}:{port} refuses"))

        self.dial(process, (host, port), established, refused)
        try:
            made: tuple[SimTransport, Any] = await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                ready.result()[0].abort()
            raise
        return made

    async def _serve(self, factory: Callable[[], Any], sock: SimListener | SharedListener) -> SimServer:
        def accept(end: End) -> None:
            protocol = factory()
            transport = SimTransport(self.loop, end, protocol, sock.address, (end.peer.process.host, end.peer.number))
            protocol.connection_made(transport)

        return SimServer(sock.serve(self, present_process(), accept))


class SimServer:
    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self.sockets: tuple[Any, ...] = ()

    async def wait_closed(self) -> None:
        pass


class SimListener:
    """A bound socket that is not listened on yet."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)

    def serve(self, network: Network, process: SimProcess, accept: Callable[[End], None]) -> Callable[[], None]:
        """Takes connections. Returns what ends that. Raises OSError if the address is in use."""
        return network.listen(process, self.address, accept)

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedListener(SimListener):
    """A listening socket that several processes may hold, as one of them has it."""

    def __init__(self, socket: SharedSocket, number: int, process: SimProcess) -> None:
        super().__init__(*socket.port.address)
        self._socket = socket
        self._number = number
        self._process = process

    def serve(self, network: Network, process: SimProcess, accept: Callable[[End], None]) -> Callable[[], None]:
        if not process.ended:
            self._socket.serve(Listener(process, accept))
        return self.close

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        self._socket.let_go(self._process)


class SimSocket:
    """What code asks a connection's socket."""

    def __init__(self, transport: SimTransport, sockname: tuple[str, int], peername: tuple[str, int]) -> None:
        self._transport = transport
        self._peername = peername
        self._sockname = sockname
        self.family = socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        return self._peername

    def getsockname(self) -> tuple[str, int]:
        return self._sockname

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockopt(self, *_: object) -> bytes:
        sent_ms = int((self._transport.loop.time() - self._transport.sent_s) * 1000)
        return struct.pack("=B43xI", 1 if self._transport.end.open else 7, sent_ms)

    def fileno(self) -> int:
        return self._transport.number


class SimTransport(asyncio.Transport):
    """A TCP connection, as asyncio has it."""

    def __init__(
        self, loop: SimLoop, end: End, protocol: Any, sockname: tuple[str, int], peername: tuple[str, int]
    ) -> None:
        super().__init__({"socket": SimSocket(self, sockname, peername), "peername": peername, "sockname": sockname})
        self.loop = loop
        self.end = end
        self.sent_s = loop.time()
        self._protocol = protocol
        self._closing = self._lost = self._eof_written = self._eof_sent = False
        self._reading = True
        self._inbox: deque[Any] = deque()
        self._buffer: deque[bytes] = deque()
        self._buffered = 0
        self.unread_bytes = 0
        """The bytes that the kernels have."""
        self._network = end.network
        self.number = FIRST_SOCKET + len(self._network.transports)
        self._network.transports.append(self)
        self._high, self._low = self._network.buffer_bytes, self._network.buffer_bytes // 4
        self._paused = False
        end.receive, end.lost = self._received, self._on_reset

    # ------------------------------------------------------------ writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._eof_written or self._lost or not data:
            return
        self._buffer.append(bytes(data))
        self._buffered += len(data)
        self._flush()
        if self._buffered > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        if not self._eof_written:
            self._eof_written = True
            self._flush()

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self._buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = self._network.buffer_bytes if high is None else high
        self._low = self._high // 4 if low is None else low

    def _flush(self) -> None:
        while self._buffer and self.unread_bytes < self._network.window_bytes:
            piece = self._buffer.popleft()
            self._buffered -= len(piece)
            self.unread_bytes += len(piece)
            self.sent_s = self.loop.time()
            self.end.send((piece, self))
        if self._buffer:
            return
        if (self._eof_written or self._closing) and not self._eof_sent:
            self._eof_sent = True
            self.end.send(EOF)
            if self._closing:
                self._drop(None)

    def taken(self, size: int) -> None:
        """The other side's process has read so many bytes."""
        self.unread_bytes -= size
        if not self._lost:
            self._flush()
            if self._paused and self._buffered <= self._low:
                self._paused = False
                self._protocol.resume_writing()

    # ------------------------------------------------------------ reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self.loop.call_soon(self._read)

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def _received(self, item: Any) -> None:
        self._inbox.append(item)
        self._read()

    def _read(self) -> None:
        while self._inbox and self._reading and not self._lost and not self._closing:
            item = self._inbox.popleft()
            if item is EOF:
                if not self._protocol.eof_received():
                    self.close()
                continue
            piece, sender = item
            self._protocol.data_received(piece)
            if not sender._lost:
                self.loop.call_soon(sender.taken, len(piece), context=sender.end.process.context)
        if self._closing and any(item is not EOF for item in self._inbox):
            # Bytes that no program reads any more.
            self._inbox.clear()
            self.end.reset()

    # ------------------------------------------------------------ the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._flush()

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self.end.reset()
            self._drop(None)

    def _on_reset(self) -> None:
        self._closing = True
        self._drop(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _drop(self, exc: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._buffer.clear()
        self._buffered = 0
        if self.end.open and self._eof_sent:
            # The kernel still delivers what was written. What comes from the other side now is answered by a reset.
            self.end.forget()
        self.loop.call_soon(self._protocol.connection_lost, exc)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol  # type: ignore[no-any-return]
