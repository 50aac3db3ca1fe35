"""The engine's child process, and the private socket to it.

``EngineProcess`` starts the child, writes its launch message, and ends it within a bound. ``EngineChannel`` is the
API process's end of the socket: typed messages, sent and received without blocking.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import zmq

from pdserve.config import EngineLaunch
from pdserve.errors import EngineError
from pdserve.wire.engine import FromEngine, ToEngine

ENGINE_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "pdserve.engine")
"""``-P`` keeps the working directory off the import path, where a folder ``kernels`` would break transformers."""
LAUNCH_TIMEOUT_S = 30.0


class EngineProcess:
    """A running child. Its standard output and error are this process's."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], launch: EngineLaunch) -> EngineProcess:
        """Starts it and writes ``launch`` to its standard input. Raises EngineError."""
        try:
            # A session of its own: Ctrl-C in a terminal reaches this process only, which drains first.
            child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as exc:
            raise EngineError(f"cannot start the engine process: {exc}") from exc
        process = cls(child)
        try:
            async with asyncio.timeout(LAUNCH_TIMEOUT_S):
                await process._write(msgspec.msgpack.encode(launch))
        except TimeoutError as exc:
            await process.end(0.0)
            raise EngineError("the engine process does not read its launch message") from exc
        except BaseException:
            await process.end(0.0)
            raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Until it has ended; how, in words."""
        status = await self._process.wait()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    async def end(self, timeout_s: float) -> None:
        """Waits this long for it to end by itself, then kills it. Afterwards it has ended, even if cancelled here."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _write(self, data: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(data)
            await stdin.drain()
            stdin.close()
            await stdin.wait_closed()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended already; wait() will tell how


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
