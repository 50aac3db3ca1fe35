"""Cuts connections that fill this process's memory without ever completing a message.

ZMQ bounds the parts of a message and the number of messages that wait, but not the number of parts of one message:
whoever connects could send parts without end, which ZMQ keeps until the last one comes, before anybody can look for a
signature. The kernel counts what each connection has received; what is not accounted for by messages is held by ZMQ.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

import zmq

log = logging.getLogger(__name__)

CHECK_S = 0.5
"""How often to check while there are connections."""
TOTAL = 4
"""All connections together may have so many times waiting what one may."""
MAX_SILENT = 1_024
"""Connections that have not completed a message yet. Nodes and engines greet at once."""
_BYTES_RECEIVED = slice(128, 136)
"""Where Linux's ``struct tcp_info`` has ``tcpi_bytes_received``, since Linux 4.1."""


@dataclass(slots=True)
class _Connection:
    since: int = 0
    """Bytes that it had received when its last message was seen."""
    heard: bool = False
    """Whether a message of it came since the last check."""
    silent: bool = True
    """Whether none has come at all."""


class ConnectionGuard:
    """Of one listening ZMQ socket. Connections go by file descriptors, as ZMQ's monitor and ``SRCFD`` name them."""

    def __init__(self, limit: int) -> None:
        """``limit`` is how many bytes one connection may have waiting: more than its whole queue of messages."""
        self._limit = limit
        self._connections: dict[int, _Connection] = {}
        """In the order in which they were accepted."""

    @property
    def watching(self) -> bool:
        """Whether there are connections to check."""
        return bool(self._connections)

    def accepted(self, descriptor: int) -> None:
        self.ended(descriptor)
        self._connections[descriptor] = _Connection()

    def ended(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)

    def heard(self, descriptor: int) -> None:
        """A whole message has come over this connection."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.heard, connection.silent = True, False

    def check(self, port: int) -> None:
        """Cut connections to ``port``, the listening one, that have too much waiting, and the oldest silent ones."""
        waiting = {descriptor: self._waiting(descriptor, port) for descriptor in tuple(self._connections)}
        total = sum(waiting.values())
        for descriptor, size in sorted(waiting.items(), key=lambda item: -item[1]):
            if size > self._limit or total > TOTAL * self._limit:
                total -= size
                self._cut(descriptor, port, f"{size} bytes wait of a message that is not complete")
        silent = [descriptor for descriptor, connection in self._connections.items() if connection.silent]
        for descriptor in silent[: max(0, len(silent) - MAX_SILENT)]:
            self._cut(descriptor, port, f"more than {MAX_SILENT} connections say nothing")

    def _waiting(self, descriptor: int, port: int) -> int:
        """Bytes received since its last message was seen. Forgets a connection that is gone."""
        connection = self._connections[descriptor]
        try:
            with _duplicate(descriptor, port) as duplicate:
                received = _received(duplicate)
        except OSError:
            self.ended(descriptor)
            return 0
        if connection.heard:
            connection.since, connection.heard = received, False
        return received - connection.since

    def _cut(self, descriptor: int, port: int, why: str) -> None:
        log.warning("a control connection is cut: %s", why)
        self.ended(descriptor)
        with suppress(OSError), _duplicate(descriptor, port) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int, port: int) -> socket.socket:
    """A connection that ZMQ may close at any moment, so that its number cannot pass to another one meanwhile.

    Raises OSError if it has passed already.
    """
    duplicate = socket.socket(fileno=os.dup(descriptor))
    if duplicate.getsockname()[1] != port:
        duplicate.close()
        raise OSError(f"descriptor {descriptor} is no connection to port {port} any more")
    return duplicate


def _received(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_BYTES_RECEIVED]
    return int(struct.unpack("Q", info)[0]) if len(info) == 8 else 0


def connection_of(frame: zmq.Frame) -> int:
    """The connection that a part of a message came over; -1 if it is not known."""
    try:
        return int(frame.get(zmq.SRCFD))
    except (zmq.ZMQError, TypeError, ValueError):
        return -1
