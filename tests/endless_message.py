"""Whoever can connect to a ZMQ socket, with no secret, and sends a message that never ends."""

from __future__ import annotations

import socket
import struct
import time

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_MORE = 0x01
_LONG = 0x02


def sends_without_end(port: int, part_bytes: int, timeout_s: float) -> bool:
    """Whether it was still being listened to after ``timeout_s``; False if it was cut before."""
    part = bytes([_MORE | _LONG]) + struct.pack(">Q", part_bytes) + bytes(part_bytes)
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.sendall(_GREETING)
        assert connection.recv(64)
        connection.sendall(b"\x04" + bytes([len(_READY)]) + _READY)
        until = time.monotonic() + timeout_s
        try:
            while time.monotonic() < until:
                connection.sendall(part)
        except ConnectionError:
            return False
    return True
