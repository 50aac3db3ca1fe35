"""The control channel's sockets. Every engine binds one, and connects one to each engine that it fetches from.

Frames are opened without trust. A frame that is not authentic is dropped and counted, and some are logged.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.control.connection_guard import ConnectionGuard, MessageReader, RoutedMessage
from pdserve.control.frame import MAX_FRAME_BYTES, Opened, Opener, Purpose, Secrets
from pdserve.errors import (
    ForgedFrame,
    MalformedFrame,
    StaleFrame,
    TransferError,
    UnreadableMessage,
    WireError,
    WrongReceiver,
)
from pdserve.log_format import LogThrottle
from pdserve_kvtransfer.events import TransferStats

log = logging.getLogger(__name__)

_SEND_QUEUE_FRAMES = 16_384
# A stranger's frames may fill the queue, because nothing looks at a signature before.
_RECEIVE_QUEUE_FRAMES = 32
# A batch is bounded so that a flood of frames leaves time for everything else.
_BATCH_FRAMES = 256
_BATCH_BYTES = MAX_FRAME_BYTES
# This is more than a monitor keeps, so that a batch has all events that were there when it began.
_BATCH_EVENTS = 4_096
_LISTEN_BACKLOG = 1_024
# The kernel would try for two minutes, at ever longer intervals, even when the network works again.
_CONNECT_TIMEOUT_MS = 2_000
_LOG_EVERY_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ControlBatch:
    """What has come to the prefill engine's control socket since the last batch.

    Connections go by their descriptors, so one may have ended and another may have its number now.
    """

    frames: list[RoutedMessage]
    more: bool
    """Whether there may be more frames at once."""
    ended: list[int]
    """Connections of earlier batches that are over. Frames of this batch may be of a newer one with the same number."""
    gone: list[int]
    """Numbers that no connection has any more. Connections of this batch's frames with these numbers are over too."""
    blocked: bool
    """Whether other frames cannot be read yet, because a message of very many parts is being dropped."""


_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 3}


def _new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    created = context.socket(kind)
    created.linger = 0
    created.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # A host that vanishes closes no connection. Without keepalive an idle peer would be kept for ever.
    for option, value in _KEEPALIVE.items():
        created.set(option, value)
    created.set(zmq.SNDHWM, _SEND_QUEUE_FRAMES)
    created.set(zmq.RCVHWM, _RECEIVE_QUEUE_FRAMES)
    return created


def _send(to: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        to.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


class _Watch:
    """The monitor of a socket, which tells what happens to its connections."""

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(events)

    def read(self) -> Iterator[tuple[int, int]]:
        """Yields the events so far with their values, without waiting."""
        while self.socket.poll(0):
            message = recv_monitor_message(self.socket)
            yield int(message["event"]), int(message["value"])

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)


class ControlServer:
    """A prefill engine's end of the control channel.

    ZMQ chooses the routes, because a client could claim another one's route if clients chose them. The constructor
    raises TransferError if the socket cannot be bound.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, advertise: str) -> None:
        self._socket = _new_socket(context, zmq.ROUTER)
        self._guard = ConnectionGuard((_RECEIVE_QUEUE_FRAMES + 2) * MAX_FRAME_BYTES)
        self._reader = MessageReader(self._socket)
        self._next_check = 0.0
        try:
            self._socket.set(zmq.BACKLOG, _LISTEN_BACKLOG)
            self._socket.set(zmq.IPV6, 1 if ":" in host else 0)
            self._watch = _Watch(self._socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self._socket.bind(f"tcp://{_bracketed(_resolved(host))}:{port}")
        except (zmq.ZMQError, OSError) as exc:
            self.close(0.0)
            raise TransferError(
                f"cannot bind the transfer control channel to {host}:{port}, which is each node's own: {exc}"
            ) from exc
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._port = int(endpoint.rpartition(":")[2])
        self.address = f"tcp://{_bracketed(advertised_host(host, advertise))}:{self._port}"

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket, self._watch.socket]

    def receive(self) -> ControlBatch:
        """Returns a batch of what has arrived, without waiting."""
        frames, more = self._frames()
        # The events are read after the frames. The monitor tells a connection's end before another connection can have
        # its number, and that one's frames come later still. So if this batch has frames of a newer connection with a
        # number, it has the end of the older connection with that number, too.
        ended: list[int] = []
        latest: dict[int, int] = {}
        for event, connection in islice(self._watch.read(), _BATCH_EVENTS):
            latest[connection] = event
            if event == zmq.EVENT_DISCONNECTED:
                self._guard.ended(connection)
                ended.append(connection)
            else:
                self._guard.accepted(connection)
        for received in frames:
            self._guard.heard(received.connection)
        gone = [connection for connection, event in latest.items() if event == zmq.EVENT_DISCONNECTED]
        return ControlBatch(frames, more, ended, gone, self._reader.dropping)

    def _frames(self) -> tuple[list[RoutedMessage], bool]:
        batch: list[RoutedMessage] = []
        size = 0
        while len(batch) < _BATCH_FRAMES and size < _BATCH_BYTES:
            message = self._reader.read()
            if message is None:
                return batch, self._reader.dropping
            batch.append(message)
            size += len(message.frame)
        return batch, True

    def send(self, route: bytes, frame: bytes) -> bool:
        """Returns False if the frame was dropped because too much is queued. One to a closed route counts as sent."""
        return _send(self._socket, [route, frame])

    def trust(self, connection: int) -> None:
        """Notes that an authentic frame has come over a connection."""
        self._guard.trusted(connection)

    def next_check(self) -> float | None:
        """Returns when to call ``check`` next, or None if there is no connection."""
        return self._next_check if self._guard.watching else None

    def check(self, now: float) -> None:
        """Cuts connections that fill the memory, if a check is due."""
        if now >= self._next_check:
            self._guard.check(self._port)
            self._next_check = now + self._guard.check_s

    def close(self, linger_s: float) -> None:
        if hasattr(self, "_watch"):
            self._watch.close()
        self._socket.close(int(linger_s * 1000))


class ControlClient:
    """A decode engine's end of the control channel.

    The constructor raises TransferError if ``control`` is not an address.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], control: str) -> None:
        self._socket = _new_socket(context, zmq.DEALER)
        self._socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._socket.set(zmq.IPV6, 1 if "[" in control else 0)
        self._watch = _Watch(self._socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        try:
            self._socket.connect(control)
        except zmq.ZMQError as exc:
            self.close(0.0)
            raise TransferError(f"{control!r} is not a control address: {exc}") from exc

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket, self._watch.socket]

    def receive(self) -> tuple[list[bytes], bool]:
        """Returns a batch of frames, without waiting, and whether there may be more."""
        batch: list[bytes] = []
        size = 0
        while len(batch) < _BATCH_FRAMES and size < _BATCH_BYTES:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return batch, False
            batch.append(parts[0] if len(parts) == 1 else b"")
            size += len(batch[-1])
        return batch, True

    def send(self, frame: bytes) -> bool:
        """Returns False if the frame was dropped because too much is queued."""
        return _send(self._socket, [frame])

    def lost(self) -> str | None:
        """Returns why the connection was lost, if it was lost since the last call."""
        for event, _ in self._watch.read():
            if event == zmq.EVENT_CONNECT_RETRIED:
                return "the prefill node cannot be connected to"
            return "the prefill node closed the connection"
        return None

    def close(self, linger_s: float) -> None:
        self._watch.close()
        self._socket.close(int(linger_s * 1000))


def loopback_only(host: str) -> bool:
    """Returns whether only this machine can reach a socket that is bound to ``host``."""
    try:
        return ipaddress.ip_address(_resolved(host)).is_loopback
    except (OSError, ValueError):
        return False


def advertised_host(host: str, advertise: str) -> str:
    """Returns where others reach a channel that is bound to ``host``: where that means all, by this machine's name."""
    if advertise:
        return advertise
    return socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104  # compared with, not bound to


def _resolved(host: str) -> str:
    # ZMQ binds to addresses and interface names, and not to host names.
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A frame that nobody of this cluster has made so. Over a peer's connection, something changes what it says."""

    why: str


class FrameOpener(Generic[T]):
    """Opens all frames that one engine receives on its control channels."""

    def __init__(self, secret: bytes | Secrets, messages: type[T], stats: TransferStats, boot_id: bytes) -> None:
        """``boot_id`` is this engine's. Frames that name another receiver are not opened."""
        self._opener: Opener[T] = Opener(secret, Purpose.TRANSFER, messages, receiver=boot_id, skew=stats.clocks)
        self._stats = stats
        self._throttle = LogThrottle(_LOG_EVERY_S)

    def open(
        self, frame: bytes, now: float
    ) -> Opened[T] | UnreadableMessage | WrongReceiver | StaleFrame | Spoilt | None:
        """Returns the message of a frame, or why there is none; None if nobody has to know."""
        try:
            return self._opener.open_from(frame)
        except WireError as exc:
            self._stats.frames_dropped += 1
            if self._throttle.add(now):
                # A record that somebody keeps must not keep the exception's frames, and with them the KV memory.
                log.warning("dropped a transfer frame (%d so far): %s", self._stats.frames_dropped, str(exc))
            if isinstance(exc, UnreadableMessage | WrongReceiver | StaleFrame):
                return exc
            return Spoilt(str(exc)) if isinstance(exc, MalformedFrame | ForgedFrame) else None
