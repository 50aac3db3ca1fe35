"""A client without the secret, which sends a ZMQ socket a message without end, or one of very many parts."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_MORE = 0x01
_LAST = 0x00
_LONG = 0x02


def sends_without_end(port: int, part_bytes: int, timeout_s: float) -> bool:
    """Returns whether the other side still read after ``timeout_s``. It may have closed the connection before."""
    part = bytes([_MORE | _LONG]) + struct.pack(">Q", part_bytes) + bytes(part_bytes)
    with _connected(port, timeout_s) as connection:
        until = time.monotonic() + timeout_s
        try:
            while time.monotonic() < until:
                connection.sendall(part)
        except ConnectionError:
            return False
    return True


def is_cut(connection: socket.socket) -> bool:
    """Returns whether the other side closes the connection within its timeout."""
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@contextmanager
def many_parts(port: int, parts: int, timeout_s: float) -> Iterator[socket.socket]:
    """Yields a connection that has sent one whole message of this many empty parts."""
    with _connected(port, timeout_s) as connection:
        connection.sendall(bytes([_MORE, 0]) * (parts - 1) + bytes([_LAST, 0]))
        yield connection


@contextmanager
def _connected(port: int, timeout_s: float) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.sendall(_GREETING)
        assert connection.recv(64)
        connection.sendall(b"\x04" + bytes([len(_READY)]) + _READY)
        yield connection
