"""Starts processes of pdserve, listens to them and ends them, and ties each process to the one that started it.

``ChildProcess`` reads what a child writes, learns from its ``listening`` line where it can be reached, and reaps it
with its whole process group. ``die_with_parent`` is the other end: nothing that pdserve starts outlives what started
it. ``partition_cores`` divides a machine's cores between processes, and ``free_port`` finds a port for a program
that cannot take a free one by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.errors import PdserveError

PARENT_PID_ENV = "PDSERVE_PARENT_PID"
"""How ``pdserve up`` tells a child whose end is to be its own."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process (SIGKILL) when process ``parent_pid``, which started it, is gone.

    Ends the process at once if it is gone already. Linux only; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


_LISTENING = re.compile(r"\bpdserve \w+ listening url=(?P<url>\S+)(?: control=(?P<control>\S+))?")
_KEPT_LINES = 20
_MAX_LINE = 64 * 1024


def command(subcommand: str, *flags: str) -> list[str]:
    """Runs this very pdserve. ``-P`` keeps folders of the current directory from standing in for packages."""
    return [sys.executable, "-P", "-m", "pdserve", subcommand, *flags]


class ChildDied(PdserveError):
    """A process ended that should not have. Its last lines are in the message."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a process can be reached, from its ``listening`` line."""

    url: str
    control: str


def parse_listening(line: str) -> Listening | None:
    """The addresses in ``pdserve <role> listening url=… [control=…]``; None for any other line."""
    match = _LISTENING.search(line)
    return Listening(match["url"], match["control"] or "") if match else None


class ChildProcess:
    """A running process, in a process group of its own, so that Ctrl-C reaches the supervisor alone.

    ``stop`` or ``kill`` has to be awaited in the end.
    """

    def __init__(
        self, name: str, argv: Sequence[str], environ: Mapping[str, str], relay: Callable[[str, str], None]
    ) -> None:
        self.name = name
        self.last_line = "starting"
        self._relay = relay
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listening: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        self._process = subprocess.Popen(
            list(argv),
            env={**environ, PARENT_PID_ENV: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._exit = asyncio.create_task(self._run())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._exit.done()

    async def wait(self) -> int:
        """The exit status, negative for a signal. Safe to cancel."""
        return await asyncio.shield(self._exit)

    async def listening(self) -> Listening:
        """Where it listens, as soon as it says so. Raises ChildDied if it ends before."""
        either: list[asyncio.Future[Any]] = [self._listening, self._exit]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.done():
            raise self.died()
        return self._listening.result()

    def died(self) -> ChildDied:
        """What to say of its unexpected end."""
        status = self._exit.result()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = "".join(f"\n    {line}" for line in self._kept)
        return ChildDied(f"{self.name} {how}" + (f"; its last lines:{lines}" if lines else ""))

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to all that is left of it after ``grace_s``."""
        if self._process.returncode is None:
            self._process.terminate()
            await asyncio.wait([self._exit], timeout=grace_s)
        await self.kill()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._kill_group()
        await self.wait()

    async def _run(self) -> int:
        reading = asyncio.create_task(self._read())
        await _exited(self._process.pid)
        # Before its number is given back by wait(): whatever else is in the group has no purpose any more.
        self._kill_group()
        status = self._process.wait()
        await reading
        return status

    async def _read(self) -> None:
        stream = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stream)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._process.stdout)
        try:
            async for line in _lines(stream):
                self._take(line)
        finally:
            transport.close()

    def _take(self, line: str) -> None:
        self._kept.append(line)
        self.last_line = line
        found = parse_listening(line)
        if found and not self._listening.done():
            self._listening.set_result(found)
        self._relay(self.name, line)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def _exited(pid: int) -> None:
    """Returns when process ``pid``, a child not yet waited for, has ended; its pipes may still be open elsewhere."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, lambda: None if ended.done() else ended.set_result(None))
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length, cut at ``_MAX_LINE``."""
    rest = b""
    while chunk := await stream.read(_MAX_LINE):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
        if len(rest) > _MAX_LINE:
            yield rest.decode(errors="replace")
            rest = b""
    if rest:
        yield rest.decode(errors="replace")


def partition_cores(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """``cores`` in ``parts`` shares as even as possible, larger ones first; round-robin where there are too few.

    Two processes that compute on one core cost each other far more than half their speed: shares overlap only then.
    """
    if parts > len(cores):
        return [(cores[index % len(cores)],) for index in range(parts)]
    size, larger = divmod(len(cores), max(parts, 1))
    starts = [index * size + min(index, larger) for index in range(parts + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]


def free_port(host: str = "127.0.0.1") -> int:
    """Nobody listened on it just now; whoever is quicker may."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


SWITCH_INTERVAL_S = 0.5e-3
"""A thread that computes in Python gives the interpreter's lock away after this time, once another one waits for it."""


def share_interpreter() -> None:
    """Makes threads let others in after ``SWITCH_INTERVAL_S`` instead of Python's 5 ms.

    An event loop that sends tokens is not held up by threads that prepare long prompts. A transfer thread, which gives
    the lock away at each poll of a link while data moves, gets it back in time.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
