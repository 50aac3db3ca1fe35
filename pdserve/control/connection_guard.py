"""Bounds what strangers' connections to a listening ZMQ socket cost in memory, descriptors and time.

ZMQ bounds the size of each part of a message and the number of messages that wait, but not the number of parts of one
message. A stranger could send parts without end. ZMQ keeps them until the last one comes, before any signature can be
checked, and then gives out no other messages until all those parts are read. So ``ConnectionGuard`` has the kernel
count the bytes of each connection, and cuts those where messages account for too few of them. ``MessageReader`` drops a
message of too many parts, a few of them at a time.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

import zmq

from pdserve.log_format import LogThrottle

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""The seconds between two checks while there are connections."""
CHECK_STRANGERS_S = 0.1
"""The seconds between two checks while some connections are strangers'."""
TOTAL = 4
"""All connections together may have this many times the waiting bytes that one may have."""
MAX_STRANGERS = 1_024
"""The most connections without an authentic frame so far. Nodes and engines send one at once."""
MAX_STRANGER_BYTES = 2**20
"""How many bytes a connection may receive before an authentic frame: more than any greeting takes."""
MAX_PARTS = 2
"""A message to a ROUTER has the route and the frame."""
_PARTS_AT_ONCE = 1_000
"""How many parts of a dropped message are read at a time, so that other work has its turn after some milliseconds."""
LOG_EVERY_S = 5.0
_BYTES_RECEIVED = slice(128, 136)
"""The bytes of Linux's ``struct tcp_info`` that are ``tcpi_bytes_received``, since Linux 4.1."""


@dataclass(slots=True)
class _Connection:
    since: int = 0
    """The bytes that the connection had received when its last message was seen."""
    received: int = 0
    """The bytes that the connection has received in all."""
    heard: bool = False
    """Whether a message has come over the connection since the last check."""
    stranger: bool = True
    """Whether no authentic frame has come over the connection yet."""


class ConnectionGuard:
    """Guards one listening ZMQ socket. Connections go by file descriptors, as ZMQ's monitor and ``SRCFD`` name them."""

    def __init__(self, limit: int) -> None:
        """Guards a socket. One connection may have ``limit`` bytes waiting, which is more than its whole queue."""
        self._limit = limit
        self._connections: dict[int, _Connection] = {}
        """The connections in the order in which they were accepted."""
        self._cuts = 0
        self._throttle = LogThrottle(LOG_EVERY_S)

    @property
    def watching(self) -> bool:
        """Whether there are connections to check."""
        return bool(self._connections)

    @property
    def check_s(self) -> float:
        """The seconds from one check to the next."""
        strangers = any(connection.stranger for connection in self._connections.values())
        return CHECK_STRANGERS_S if strangers else CHECK_S

    def accepted(self, descriptor: int) -> None:
        # The connection's first frame may have been read before ZMQ reports the connection.
        self._connections.setdefault(descriptor, _Connection())

    def ended(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)

    def heard(self, descriptor: int) -> None:
        """Notes that a whole message has come over this connection."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.heard = True

    def trusted(self, descriptor: int) -> None:
        """Notes that an authentic frame has come over this connection."""
        self._connections.setdefault(descriptor, _Connection()).stranger = False

    def check(self, port: int) -> None:
        """Cuts connections to ``port``, the listening one.

        It cuts those with too many waiting bytes, strangers' that have sent too many bytes, and the oldest of too many
        strangers'.
        """
        waiting = {descriptor: self._waiting(descriptor, port) for descriptor in tuple(self._connections)}
        total = sum(waiting.values())
        for descriptor, size in sorted(waiting.items(), key=lambda item: -item[1]):
            if size > self._limit or total > TOTAL * self._limit:
                total -= size
                self._cut(descriptor, port, f"{size} bytes wait of a message that is not complete")
        strangers = [descriptor for descriptor, connection in self._connections.items() if connection.stranger]
        for descriptor in strangers:
            if self._connections[descriptor].received > MAX_STRANGER_BYTES:
                self._cut(descriptor, port, f"more than {MAX_STRANGER_BYTES} bytes, and nothing authentic among them")
        strangers = [descriptor for descriptor in strangers if descriptor in self._connections]
        for descriptor in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
            self._cut(descriptor, port, f"more than {MAX_STRANGERS} have said nothing authentic")

    def _waiting(self, descriptor: int, port: int) -> int:
        """Returns the bytes received since the last message was seen. Forgets a connection that is gone."""
        connection = self._connections[descriptor]
        try:
            with _duplicate(descriptor, port) as duplicate:
                received = _received(duplicate)
        except OSError:
            self.ended(descriptor)
            return 0
        if connection.heard:
            connection.since, connection.heard = received, False
        connection.received = received
        return received - connection.since

    def _cut(self, descriptor: int, port: int, why: str) -> None:
        """Ends the connection, and logs some of the reasons. Messages that came over it before can still be read."""
        self._cuts += 1
        if self._throttle.add(time.monotonic()):
            log.warning("a control connection is cut (%d so far): %s", self._cuts, why)
        self.ended(descriptor)
        with suppress(OSError), _duplicate(descriptor, port) as duplicate:
            # With this option ZMQ's close resets the connection. A sender that finds no room would wait for a minute.
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            duplicate.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int, port: int) -> socket.socket:
    """Duplicates a connection, so that its number cannot pass to another one when ZMQ closes it.

    Raises OSError if the number has passed to another file already.
    """
    number = os.dup(descriptor)
    try:
        duplicate = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
    name = duplicate.getsockname()
    if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or name[1] != port:
        duplicate.close()
        raise OSError(f"descriptor {descriptor} is no connection to port {port} any more")
    return duplicate


def _received(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_BYTES_RECEIVED]
    return int(struct.unpack("Q", info)[0]) if len(info) == 8 else 0


def connection_of(frame: zmq.Frame) -> int:
    """Returns the connection that a part of a message came over, or -1 if it is not known."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, TypeError, ValueError):
        return -1


@dataclass(frozen=True, slots=True)
class RoutedMessage:
    """A message that a ROUTER has received."""

    route: bytes
    """The route for an answer."""
    frame: bytes
    """The frame; empty if the message has another number of parts than ``MAX_PARTS``."""
    connection: int
    """The connection, as ``connection_of`` returns it."""


class MessageReader:
    """Reads a ROUTER's messages, and drops a message of a million parts a few of them at a time.

    Meanwhile no other message can be read, because ZMQ gives out the parts of a message together. The sender is not cut
    here: if it has gone since, its descriptor may be that of a newcomer. ``ConnectionGuard`` cuts it for its bytes.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self.dropping = False
        """Whether parts of a dropped message are still to be read."""

    def read(self) -> RoutedMessage | None:
        """Returns the next message, or None if there is none or, while ``dropping``, none yet. It never waits."""
        try:
            if self.dropping and not self._drop():
                return None
            parts = [self._router.recv(zmq.NOBLOCK, copy=False)]
            while parts[-1].more and len(parts) <= MAX_PARTS:
                parts.append(self._router.recv(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return None
        self.dropping = parts[-1].more
        frame = parts[1].bytes if len(parts) == MAX_PARTS else b""
        return RoutedMessage(parts[0].bytes, frame, connection_of(parts[-1]))

    def _drop(self) -> bool:
        """Drops some parts. Returns whether all are dropped."""
        for _ in range(_PARTS_AT_ONCE):
            self._router.recv(zmq.NOBLOCK)
            if not self._router.getsockopt(zmq.RCVMORE):
                self.dropping = False
                return True
        return False
