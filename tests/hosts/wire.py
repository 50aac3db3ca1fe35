"""A network between namespaces that a test can slow down, make lossy, cut and mend, in each direction separately.

Each host's veth pair ends here, in a packet socket. A thread passes each frame on to the host that it is addressed to.
So faults need no kernel feature but veth (many kernels lack netem), and frames can be counted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import random
import select
import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET = 263
# With this option, a frame keeps the kernel's note that its checksum is still missing.
_PACKET_VNET_HDR = 15
_VNET_HDR_BYTES = 10
_PACKET_IGNORE_OUTGOING = 23
_BUFFER_BYTES = 16 * 2**20
_LARGEST_FRAME = 2**16 + 64
_TO_MANY = 1
"""The bit of an address's first byte that says that it is that of several hosts."""
_FRAMES_AT_ONCE = 64
_FULL_FRAME = 1_400
_ETHERNET_BYTES = 14
_IP_AT = _VNET_HDR_BYTES + _ETHERNET_BYTES
_IPV4, _TCP, _SYN = 0x0800, 6, 2
_NUMBERS = 1 << 32
"""TCP numbers the bytes of a stream modulo this."""
SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Segment:
    """What a frame has of a TCP stream. The number of its beginning counts as a byte."""

    ports: tuple[int, int]
    """Those of the source and of the target."""
    number: int
    """The number of its first byte."""
    size: int
    at: int
    """Where in the frame its bytes begin."""
    begins: bool

    @property
    def end(self) -> int:
        return (self.number + self.size) % _NUMBERS


def segment_of(frame: bytes) -> Segment | None:
    """Returns what a frame, with its virtual network header, has of a TCP stream over IPv4; None for any other."""
    if len(frame) < _IP_AT + 40 or int.from_bytes(frame[_IP_AT - 2 : _IP_AT]) != _IPV4 or frame[_IP_AT + 9] != _TCP:
        return None
    tcp = _IP_AT + (frame[_IP_AT] & 15) * 4
    at = tcp + (frame[tcp + 12] >> 4) * 4
    begins = bool(frame[tcp + 13] & _SYN)
    size = begins + _IP_AT + int.from_bytes(frame[_IP_AT + 2 : _IP_AT + 4]) - at
    ports = (int.from_bytes(frame[tcp : tcp + 2]), int.from_bytes(frame[tcp + 2 : tcp + 4]))
    return Segment(ports, int.from_bytes(frame[tcp + 4 : tcp + 8]), size, at, begins)


def _is_behind(number: int, other: int) -> bool:
    """Whether ``number`` is ``other`` or comes after it in a stream."""
    return (number - other) % _NUMBERS < _NUMBERS // 2


class Corruption:
    """One byte of one TCP stream, which is changed each time that it is sent.

    It is a byte that has not been sent before: so the receiver gets no other one in its place, whatever is lost and
    sent again. Frames carry no checksum that would tell: a network card would set it.
    """

    def __init__(self, spared: Collection[int]) -> None:
        """Streams from or to the ports ``spared`` are left alone."""
        self._spared = frozenset(spared)
        self._ports: tuple[int, int] | None = None
        self._number = 0

    @property
    def done(self) -> bool:
        """Whether a byte was changed."""
        return self._ports is not None

    def applied(self, frame: bytes, segment: Segment, *, is_new: bool) -> bytes:
        """Returns a frame as it is to be passed on. ``is_new`` says that nothing of it was sent before."""
        if self._ports is None and is_new and segment.size > _FULL_FRAME and self._spared.isdisjoint(segment.ports):
            self._ports, self._number = segment.ports, (segment.number + segment.size // 2) % _NUMBERS
        offset = (self._number - segment.number) % _NUMBERS
        if segment.ports != self._ports or offset >= segment.size:
            return frame
        at = segment.at + offset
        return frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :]


@dataclass(slots=True)
class Path:
    """One direction between two hosts. The test may set ``delay_s``, ``loss`` and ``cut`` at any time."""

    delay_s: float = 0.0
    loss: float = 0.0
    """The share of frames that are lost."""
    cut: bool = False
    passed: int = 0
    """The bytes of frames that have passed since the start."""
    lost: int = 0
    """The number of frames that were lost since the start."""
    lost_own: int = 0
    """The number of those among them that were for the target alone: hosts also send to all, unasked."""
    delayed: int = 0
    """The number of frames that were delayed since the start."""
    cut_at: float = math.inf
    """The value of ``passed`` at which the path is cut."""
    corruption: Corruption | None = None
    was_cut: threading.Event = field(default_factory=threading.Event)
    """This event is set when ``passed`` has reached ``cut_at``."""
    _corrupted_from: int = 0
    _ends: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number behind the last byte that was sent of each TCP stream, by its ports."""

    def corrupt(self, spared: Collection[int] = (), after: int = 0) -> Corruption:
        """Has a byte be changed after this many more bytes, in no stream from or to the ports ``spared``."""
        self.corruption, self._corrupted_from = Corruption(spared), self.passed + after
        return self.corruption

    def carried(self, frame: bytes) -> bytes:
        """Returns a frame that passes as it arrives."""
        segment = segment_of(frame)
        if segment is None:
            return frame
        end = segment.number if segment.begins else self._ends.get(segment.ports)
        is_new = end is not None and _is_behind(segment.number, end) and self.passed > self._corrupted_from
        if end is None or _is_behind(segment.end, end):
            self._ends[segment.ports] = segment.end
        return frame if self.corruption is None else self.corruption.applied(frame, segment, is_new=is_new)

    def cut_after(self, size: int) -> None:
        """Cuts the path after this many more bytes have passed."""
        self.was_cut.clear()
        self.cut_at = self.passed + size

    def mend(self) -> None:
        self.cut_at, self.cut, self.loss, self.delay_s, self.corruption = math.inf, False, 0.0, 0.0, None

    def passes(self, size: int, dice: random.Random) -> bool:
        """Decides whether a frame of this size passes, and counts it."""
        if self.passed >= self.cut_at:
            self.cut, self.cut_at = True, math.inf
            self.was_cut.set()
        if self.cut or (self.loss and dice.random() < self.loss):
            self.lost += 1
            return False
        self.passed += size
        return True


@dataclass(frozen=True, slots=True)
class Port:
    """A host's connection to the wire."""

    host: str
    mac: bytes
    socket: socket.socket


def open_port(host: str, mac: str, interface: str) -> Port:
    """Opens the outer end of a host's veth pair. The calling thread must be in the namespace of ``interface``."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    opened.setblocking(False)
    opened.bind((interface, _ALL_PROTOCOLS))
    return Port(host, bytes.fromhex(mac.replace(":", "")), opened)


class Wire:
    """Joins the ports until it is closed, and then closes them."""

    def __init__(self, ports: list[Port], seed: int = 0) -> None:
        self._ports = {port.socket.fileno(): port for port in ports}
        self._by_mac = {port.mac: port for port in ports}
        self._paths: Mapping[tuple[str, str], Path] = {
            (a.host, b.host): Path() for a, b in itertools.permutations(ports, 2)
        }
        self._dice = random.Random(seed)
        self._delayed: list[tuple[float, int, Port, bytes]] = []
        self._numbers = itertools.count()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
        self._thread.start()

    def path(self, source: str, target: str) -> Path:
        return self._paths[source, target]

    def between(self, one: str, other: str) -> tuple[Path, Path]:
        """Returns the paths between two hosts, in both directions."""
        return self.path(one, other), self.path(other, one)

    def around(self, host: str) -> list[Path]:
        """Returns all paths to and from a host."""
        return [path for ends, path in self._paths.items() if host in ends]

    def towards(self, host: str) -> list[Path]:
        """Returns all paths to a host."""
        return [path for (_, target), path in self._paths.items() if target == host]

    def mend(self) -> None:
        for path in self._paths.values():
            path.mend()

    def settle(self) -> None:
        """Returns when what the test has set holds for every frame that is passed on from now on."""
        self._settled.clear()
        os.eventfd_write(self._wake, 1)
        if not self._settled.wait(SETTLE_S):
            raise TimeoutError(f"the wire has passed nothing on for {SETTLE_S:g} s")

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        os.close(self._wake)
        for port in self._ports.values():
            port.socket.close()

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._stop, self._wake, *self._ports):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._until_due_ms()):
                if fd == self._stop:
                    return
                if fd == self._wake:
                    os.eventfd_read(fd)
                    self._settled.set()
                else:
                    self._read(self._ports[fd])
            self._deliver()

    def _until_due_ms(self) -> int | None:
        return max(0, math.ceil((self._delayed[0][0] - time.monotonic()) * 1000)) if self._delayed else None

    def _read(self, port: Port) -> None:
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = port.socket.recv(_LARGEST_FRAME)
            except BlockingIOError:
                return
            addressed = self._by_mac.get(frame[_VNET_HDR_BYTES : _VNET_HDR_BYTES + 6])
            for target in self._ports.values() if addressed is None else (addressed,):
                if target is not port:
                    self._pass(port, target, frame)

    def _pass(self, source: Port, target: Port, frame: bytes) -> None:
        path = self.path(source.host, target.host)
        if not path.passes(len(frame), self._dice):
            path.lost_own += not frame[_VNET_HDR_BYTES] & _TO_MANY
            return
        frame = path.carried(frame)
        if path.delay_s:
            path.delayed += 1
            heapq.heappush(self._delayed, (time.monotonic() + path.delay_s, next(self._numbers), target, frame))
        else:
            _put(target, frame)

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._delayed)
            _put(target, frame)


def _put(target: Port, frame: bytes) -> None:
    # A full queue drops frames, as a switch does.
    with contextlib.suppress(BlockingIOError, OSError):
        target.socket.send(frame)
