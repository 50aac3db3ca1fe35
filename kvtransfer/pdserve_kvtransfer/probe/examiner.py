"""Asks a prefill engine what ``pdserve doctor`` wants to know, as a decode engine without KV memory would.

``ProbeAsker`` is the asking end of a probe's link. Both ends have scratch memory alone.
"""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar, cast

import zmq

from pdserve.control.frame import Opened, Purpose, Sealer
from pdserve.errors import PeerLost
from pdserve.wire.ids import new_id
from pdserve.wire.transfer import (
    EngineSpec,
    Examine,
    Examined,
    Ping,
    Pong,
    Probe,
    ProbeEnd,
    ProbeOpened,
    ProbeRefused,
    Refused,
    ToDecode,
    ToPrefill,
    Welcome,
)
from pdserve.wire.version import SPOKEN
from pdserve_kvtransfer.control.handshake import Handshake
from pdserve_kvtransfer.control.sockets import ControlClient, FrameOpener
from pdserve_kvtransfer.events import TransferStats
from pdserve_kvtransfer.pieces import label_of, tag_of
from pdserve_kvtransfer.transport import BusyPoll, Link
from pdserve_kvtransfer.ucx.ucx_library import Lane
from pdserve_kvtransfer.ucx.ucx_transport import UcxLink, UcxTransport

PING_TAG = 1
"""The tag of a ping: a few bytes that the host sends back."""
START_TAG = 2
"""The tag of the asker's message that asks for the load."""
LOAD_TAG = 3
"""The tag of the messages that were asked for, which have consecutive indexes."""

PING_BYTES = 8
MAX_ASKER_BYTES = 64
"""The longest message that an asker may send. A longer one ends the probe."""

PROBE_LIMIT_S = 10.0
"""The longest time that a probe may take."""
PAUSE_S = 1.0
"""The time between two probes, even of two askers."""
WINDOW = 32
"""How many messages are on the way at once."""

_PINGS = 200
_WARM_UP_MESSAGES = 8
_MAX_WAIT_MS = 20
_PARTS = 4
_MIN_PART = 3 * WINDOW
"""The messages in a part: many times the number that may have arrived before its clock starts."""


class ProbeAsker:
    """The asker's end of one connected link. Everything that it receives lands in scratch memory."""

    def __init__(self, link: Link, message_bytes: int, deadline: float) -> None:
        self._link = link
        self._deadline = deadline
        self._size = message_bytes
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)

    def ping(self) -> float:
        """Returns half the median round trip in seconds. Raises PeerLost if no ping comes back."""
        times = []
        for index in range(_PINGS):
            begun = time.perf_counter()
            self._link.send([0], PING_BYTES, [label_of(PING_TAG, index)])
            if not self._until(self._answered):
                break
            times.append(time.perf_counter() - begun)
        if not times:
            raise PeerLost("nothing came back over UCX")
        return statistics.median(times) / 2

    def _answered(self) -> bool:
        take(self._link, PING_TAG, PING_BYTES)
        return bool(self._link.landed())

    def load(self, messages: int) -> tuple[int, float]:
        """Returns how many messages were received, and the bytes a second once the load runs."""
        load = _Throughput(self._link, self._size, messages)
        self._link.send([0], PING_BYTES, [label_of(START_TAG, 0)])
        self._until(load.step)
        return load.landed, load.bytes_per_s

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Lets data move as a transfer thread does until ``condition``. Returns False if time ran out."""
        busy_poll = BusyPoll()
        while not condition():
            now = time.monotonic()
            if now >= self._deadline:
                return False
            moved = self._link.progress()
            self._link.sent()  # nobody asks, but what is over and not read keeps the link from being armed
            if self._link.broken():
                raise PeerLost("the connection of the probe broke")
            if not busy_poll.again(moved, True, now) and self._link.arm():
                self._poll.poll(_MAX_WAIT_MS)
        return True


def probe_memory(message_bytes: int) -> memoryview:
    """Returns the memory for the asker's link, which sends from its start and receives there."""
    return memoryview(bytearray(max(message_bytes, PING_BYTES)))


def take(link: Link, tag: int, length: int) -> None:
    """Receives the messages that have arrived. Raises PeerLost if one has another tag or length."""
    arrivals = link.arrivals()
    if any(tag_of(arrival.label) != tag or arrival.length != length for arrival in arrivals):
        raise PeerLost("the probe's link carries something else")
    if arrivals:
        link.receive([0] * len(arrivals))


class _Throughput:
    """The messages of a load, which are received as they come, all at the same place."""

    def __init__(self, link: Link, message_bytes: int, messages: int) -> None:
        self._link = link
        self._size = message_bytes
        self._messages = messages
        # Connections start slowly, so the clock starts at the end of this message.
        self._warm = max(1, min(_WARM_UP_MESSAGES, messages // 2))
        self._began = time.perf_counter()
        self._times: list[float] = []

    @property
    def landed(self) -> int:
        return len(self._times)

    @property
    def bytes_per_s(self) -> float:
        """The rate of the best part of the load, since others use the machine, too; 0 if too little landed to tell."""
        timed = self._times[self._warm - 1 :]
        part = max((len(timed) - 1) // _PARTS, _MIN_PART)
        starts = range(0, len(timed) - part, part)
        parts = [timed[start : start + part + 1] for start in starts] or [timed]
        best = max(self._rate(times) for times in parts)
        if best or self.landed < self._messages:
            return best
        # All messages landed in one poll.
        return self.landed * self._size / (self._times[-1] - self._began)

    def _rate(self, times: list[float]) -> float:
        """Returns the rate after the first time. Messages that landed at that time took longer than is known."""
        span = times[-1] - times[0] if times else 0.0
        return sum(later > times[0] for later in times) * self._size / span if span > 0 else 0.0

    def step(self) -> bool:
        """Receives the messages that have arrived. Returns whether all have landed. Raises PeerLost."""
        now = time.perf_counter()
        self._times += [now] * len(self._link.landed())
        take(self._link, LOAD_TAG, self._size)
        return self.landed == self._messages


_CONTROL_PINGS = 20

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a probe."""

    message_bytes: int
    received: int
    """How many of the messages arrived; fewer than were asked for if time ran out."""
    bytes_per_s: float
    """The rate in the best part of the load; 0 if too few arrived to tell."""
    latency_s: float
    """Half the median round trip of a few bytes."""
    lanes: tuple[Lane, ...]


class Examiner:
    """A connection to one prefill engine. It is a context manager, and its calls wait for a bounded time.

    Methods raise PeerLost if the connection breaks or the engine gives up.
    """

    def __init__(self, control: str, secret: bytes, transport: UcxTransport) -> None:
        """The examiner closes ``transport``. Raises TransferError if ``control`` is not an address."""
        self._boot_id = new_id()
        self._sealer = Sealer(secret, Purpose.TRANSFER, self._boot_id)
        self._opener: FrameOpener[ToDecode] = FrameOpener(
            secret, cast("type[ToDecode]", ToDecode), TransferStats(), self._boot_id
        )
        self._peer: bytes | None = None
        """The boot id of the prefill engine; None if it is not known."""
        self._protocol: int | None = None
        """The version of the protocol that both support; None if it is not known."""
        self._transport = transport
        self._links: list[UcxLink] = []
        """The links of handshakes, which stay open because the other engine takes a closed one for a death."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._client = ControlClient(self._context, control)
        except BaseException:
            self._context.term()
            transport.close()
            raise

    def __enter__(self) -> Examiner:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for link in self._links:
            link.close()
        self._client.close(0.1)
        self._context.term()
        self._transport.close()

    def examine(self, timeout_s: float) -> Examined | None:
        """Returns the engine's properties, or None without an answer.

        There is none from an engine with another secret or a far-off clock, or if there is no engine.
        """
        self._send(Examine(self._boot_id, SPOKEN.newest, SPOKEN.oldest))
        examined = self._answer(Examined, timeout_s)
        if examined is not None:
            self._peer, self._protocol = examined.boot_id, SPOKEN.common(examined.spec.spoken)
        return examined

    def greet(self, spec: EngineSpec, boot_id: bytes, timeout_s: float) -> bool:
        """Makes the handshake of a decode engine with the engine of ``boot_id``. Returns False if there is no answer.

        Raises HandshakeRefused if the engines do not fit.
        """
        link = self._transport.open_link(probe_memory(0))
        self._links.append(link)
        self._peer = boot_id
        handshake = Handshake(self._boot_id, spec, boot_id)
        self._send(handshake.hello([link.address]))
        answer = self._answer((Welcome, Refused), timeout_s)
        if isinstance(answer, Refused):
            raise handshake.refused(answer)
        if isinstance(answer, Welcome):
            handshake.on_welcome(answer)
        return answer is not None

    def control_round_trip_s(self, timeout_s: float) -> float | None:
        """Returns the median of some round trips after a handshake, or None if an answer is missing."""
        times = []
        for _ in range(_CONTROL_PINGS):
            begun = time.perf_counter()
            self._send(Ping(self._boot_id))
            if self._answer(Pong, timeout_s) is None:
                return None
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def probe(self, message_bytes: int, messages: int, timeout_s: float) -> Measured:
        """Measures a link that carries scratch bytes. It gives up the rest of them after ``timeout_s``."""
        link = self._transport.open_link(probe_memory(message_bytes))
        try:
            self._send(
                Probe(boot_id=self._boot_id, address=link.address, message_bytes=message_bytes, messages=messages)
            )
            opened = self._answer((ProbeOpened, ProbeRefused), timeout_s)
            if isinstance(opened, ProbeRefused):
                raise PeerLost(opened.reason)
            if not isinstance(opened, ProbeOpened):
                raise PeerLost("the probe was not answered")
            link.connect([opened.address])
            asker = ProbeAsker(link, message_bytes, time.monotonic() + timeout_s)
            latency_s = asker.ping()
            received, bytes_per_s = asker.load(messages)
            return Measured(message_bytes, received, bytes_per_s, latency_s, link.lanes())
        finally:
            self._send(ProbeEnd(self._boot_id))
            link.close()

    def _send(self, message: ToPrefill) -> None:
        if self._peer is not None and self._protocol is not None:
            self._client.send(self._sealer.seal_to(self._peer, self._protocol, message))
        else:
            self._client.send(self._sealer.seal(message, self._peer))

    def _answer(self, kind: type[M] | tuple[type[M], ...], timeout_s: float) -> M | None:
        """Returns the next message of these kinds, if it comes in time. It ignores others."""
        deadline = time.monotonic() + timeout_s
        poller = zmq.Poller()
        for socket in self._client.sockets:
            poller.register(socket, zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            poller.poll(max(1, int(left * 1000)))
            for frame in self._client.receive()[0]:
                opened = self._opener.open(frame, time.monotonic())
                if isinstance(opened, Opened) and isinstance(opened.message, kind):
                    return opened.message
            reason = self._client.lost()
            if reason is not None:
                raise PeerLost(reason)
        return None
