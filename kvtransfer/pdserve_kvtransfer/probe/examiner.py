"""Asks a prefill engine what ``pdserve doctor`` wants to know, as a decode engine without KV memory would."""

from __future__ import annotations

import statistics
import time
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
from pdserve_kvtransfer.probe.asker import ProbeAsker, probe_memory
from pdserve_kvtransfer.ucx.ucx_library import Lane
from pdserve_kvtransfer.ucx.ucx_transport import UcxLink, UcxTransport

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
