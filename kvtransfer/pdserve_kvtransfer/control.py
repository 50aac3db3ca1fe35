"""The control channel's sockets: a prefill engine binds one, a decode engine connects one to each prefill engine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.errors import TransferError
from pdserve.wire.frame import MAX_FRAME_BYTES

_QUEUE_FRAMES = 16_384
_LISTEN_BACKLOG = 1_024


@dataclass(frozen=True, slots=True)
class Received:
    """One frame at the prefill engine."""

    route: bytes
    """Where an answer goes."""
    connection: int
    """Which TCP connection it came over, as ``ControlServer.disconnected`` names it; -1 if unknown."""
    frame: bytes


def _new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    created = context.socket(kind)
    created.linger = 0
    created.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    created.set(zmq.SNDHWM, _QUEUE_FRAMES)
    created.set(zmq.RCVHWM, _QUEUE_FRAMES)
    return created


def _send(to: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        to.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


class _Watch:
    """A socket's monitor: what happens to its connections."""

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(events)

    def read(self) -> Iterator[tuple[int, int]]:
        """Events with their values, without waiting."""
        while self.socket.poll(0):
            message = recv_monitor_message(self.socket)
            yield int(message["event"]), int(message["value"])

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)


class ControlServer:
    """Raises TransferError if it cannot be bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, advertise: str) -> None:
        self._socket = _new_socket(context, zmq.ROUTER)
        try:
            self._socket.set(zmq.ROUTER_HANDOVER, 1)
            self._socket.set(zmq.BACKLOG, _LISTEN_BACKLOG)
            self._socket.set(zmq.IPV6, 1 if ":" in host else 0)
            self._watch = _Watch(self._socket, zmq.EVENT_DISCONNECTED)
            self._socket.bind(f"tcp://{_bracketed(_resolved(host))}:{port}")
        except (zmq.ZMQError, OSError) as exc:
            self.close(0.0)
            raise TransferError(f"cannot bind the transfer control channel to {host}:{port}: {exc}") from exc
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.address = f"tcp://{_bracketed(advertise or host)}:{endpoint.rpartition(':')[2]}"

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket, self._watch.socket]

    def receive(self) -> Iterator[Received]:
        """What is there, without waiting."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            # Our frames are one part each; anything else passes for an empty one, to be dropped as malformed.
            frame = parts[1].bytes if len(parts) == 2 else b""
            yield Received(parts[0].bytes, _connection(parts[-1]), frame)

    def send(self, route: bytes, frame: bytes) -> bool:
        """False if the frame was dropped because too much is queued; one to a route that is gone counts as sent."""
        return _send(self._socket, [route, frame])

    def disconnected(self) -> list[int]:
        """Connections that have ended since the last call."""
        return [value for _, value in self._watch.read()]

    def close(self, linger_s: float) -> None:
        if hasattr(self, "_watch"):
            self._watch.close()
        self._socket.close(int(linger_s * 1000))


class ControlClient:
    """Raises TransferError if ``control`` is not an address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], control: str, route: bytes) -> None:
        self._socket = _new_socket(context, zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, route)
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

    def receive(self) -> Iterator[bytes]:
        """What is there, without waiting."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parts[0] if len(parts) == 1 else b""

    def send(self, frame: bytes) -> bool:
        """False if the frame was dropped because too much is queued."""
        return _send(self._socket, [frame])

    def lost(self) -> str | None:
        """Why the connection is no good, if it was found so since the last call."""
        for event, _ in self._watch.read():
            if event == zmq.EVENT_CONNECT_RETRIED:
                return "the prefill node cannot be connected to"
            return "the prefill node closed the connection"
        return None

    def close(self, linger_s: float) -> None:
        self._watch.close()
        self._socket.close(int(linger_s * 1000))


def is_loopback(host: str) -> bool:
    """Whether a bound host is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(_resolved(host)).is_loopback
    except (OSError, ValueError):
        return False


def _resolved(host: str) -> str:
    # ZMQ binds to addresses and interface names only.
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _connection(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, TypeError, ValueError):
        return -1
