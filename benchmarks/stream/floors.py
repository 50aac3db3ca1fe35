"""Measures what no server can save: a chunk's way through a loopback socket, and a token's way to the API process.

``chunk_floor`` writes a chunk to such a socket and reads it there. ``crossing`` sends a step's tokens from the engine
to its API process in one message, and then each token in a message of its own.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from dataclasses import dataclass

import msgspec
import zmq

from pdserve.engine.api_channel import ApiChannel
from pdserve.wire.engine import FromEngine, RequestOutput, StepOutput

_CHUNK = b"x" * 256
_IN_A_ROW = 16
_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class ChunkFloor:
    """The CPU seconds of this process for one chunk."""

    write_s: float
    read_s: float


def chunk_floor() -> ChunkFloor:
    """Returns the mean of many chunks of 256 bytes, each with a system call of its own."""
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


_TOKENS = 1024
_CROSSINGS = 40
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class Crossing:
    """The CPU seconds of the receiving thread for one token."""

    at_once_s: float
    one_by_one_s: float


def crossing() -> Crossing:
    """Returns the median over steps of 1,024 requests, over the kind of socket that the two processes use."""
    return Crossing(_received(batched=True), _received(batched=False))


def _received(*, batched: bool) -> float:
    step = StepOutput([RequestOutput(request, [request]) for request in range(_TOKENS)])
    decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
    used: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder,
        zmq.Context() as context,
        context.socket(zmq.PAIR) as api,
    ):
        address = f"ipc://{folder}/engine"
        api.bind(address)
        channel = ApiChannel(context, address, batched=batched)
        for _ in range(_CROSSINGS):
            channel.send(step)
            began, tokens = time.thread_time(), 0
            while tokens < _TOKENS:
                message = decoder.decode(api.recv())
                assert isinstance(message, StepOutput)
                tokens += len(message.outputs)
            used.append(time.thread_time() - began)
        channel.close(_GOODBYE_S)
    return statistics.median(used) / _TOKENS
