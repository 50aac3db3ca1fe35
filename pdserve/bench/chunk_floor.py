"""What no server can save: writing a chunk to a socket of the loopback interface, and reading it there."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

_CHUNK = b"x" * 256
_IN_A_ROW = 16
_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class ChunkFloor:
    """CPU seconds of this process for one chunk."""

    write_s: float
    read_s: float


def chunk_floor() -> ChunkFloor:
    """The mean of many chunks of 256 bytes, each with a system call of its own."""
    written = read = 0.0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        with sender, receiver:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_ROUNDS):
                begin = time.thread_time()
                for _ in range(_IN_A_ROW):
                    sender.send(_CHUNK)
                between = time.thread_time()
                for _ in range(_IN_A_ROW):
                    receiver.recv(len(_CHUNK), socket.MSG_WAITALL)
                written += between - begin
                read += time.thread_time() - between
    chunks = _ROUNDS * _IN_A_ROW
    return ChunkFloor(written / chunks, read / chunks)
