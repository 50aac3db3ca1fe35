"""The API process's end of the private socket to its engine: typed messages, sent and received without blocking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec
import zmq

from pdserve.errors import EngineError
from pdserve.wire.engine import FromEngine, ToEngine

DRAIN_AT_ONCE = 64
"""Messages handled before other tasks get a turn."""


class EngineChannel:
    """A bound ZMQ PAIR. Sending is synchronous, so that a cancelled task can still send an abort on its way out."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[FromEngine], None],
        on_garbage: Callable[[EngineError], None],
    ) -> None:
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        # Unlimited queues: what can be in them is bounded by how many requests the client opens.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._fd = cast("int", self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def send(self, message: ToEngine) -> bool:
        """False if there is no engine (any more) to take it."""
        if self._socket.closed:
            return False
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # ZMQ's descriptor signals edges only, and sending may have swallowed one.
        self._loop.call_soon(self._drain)
        return True

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()
            self._context.term()

    def drain(self) -> None:
        """Handles what has arrived, all of it: for a process that has ended, whose last words count."""
        while self._drain():
            pass

    def _drain(self) -> bool:
        """True if there may be more."""
        for _ in range(DRAIN_AT_ONCE):
            if self._socket.closed:
                return False
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._handle(frame)
        self._loop.call_soon(self._drain)
        return True

    def _handle(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            self._on_garbage(EngineError(f"the engine sent a message that is none: {exc}"))
            return
        self._on_message(message)
