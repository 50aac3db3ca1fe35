"""The engine child process: start, launch message, and an end that is bounded."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from pdserve.config import EngineLaunch
from pdserve.errors import EngineError

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
