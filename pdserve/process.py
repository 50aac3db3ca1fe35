"""Every way in which pdserve starts, hears and ends processes, and what each process sets up at its start.

The side that starts one: ``ChildProcess`` is a running child that may get a launch message; ``ServerProcess`` also
relays the lines of a server and learns its addresses, and ``AnsweringProcess`` answers orders with lines.
The side that is started: ``read_launch`` reads the launch message, ``die_with_parent`` ties the process to the one that
started it, so that nothing outlives it, ``set_up_logging`` and ``allow_open_files`` are for every server,
``loading_libraries`` is for one that loads large ones, and ``collect_rarely`` for one that leaves next to no reference
cycles.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import logging
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import msgspec

from pdserve.config import LogConfig, LogFormat
from pdserve.errors import ConfigError, PdserveError
from pdserve.log_format import JsonFormatter, as_text, log_all_as_json

PARENT_PID_ENV = "PDSERVE_PARENT_PID"
"""The number of the process that started this one, if it was one of pdserve's."""

Launch = TypeVar("Launch")


def python_program(module: str, *args: str) -> tuple[str, ...]:
    """Returns the command that runs ``module``.

    ``-P`` keeps the working directory off the import path, where a folder ``kernels`` would break transformers.
    """
    return (sys.executable, "-P", "-m", module, *args)


def pdserve_command(subcommand: str, *flags: str) -> tuple[str, ...]:
    """Returns the command that runs this very pdserve."""
    return python_program("pdserve", subcommand, *flags)


# ---------------------------------------------------------------- the side that starts a process


class ChildDied(PdserveError):
    """A process ended, or fell silent, that should not have."""


def exit_words(status: int) -> str:
    """Returns the words about a process's end that follow its name. ``status`` is negative for a signal."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class ChildProcess:
    """A running process. ``end`` or ``reap`` must be called in the end; afterwards it has ended.

    The kernel ends a child of pdserve's own when the thread that started it ends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        launch: object = None,
        environ: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        own_session: bool = False,
    ) -> None:
        """Starts the process. Its standard input is ``launch`` as MessagePack, if that is given. Raises OSError.

        In a session of its own it hears no Ctrl-C in the terminal, and all that it leaves behind ends with it.
        """
        self.name = name
        self._own_session = own_session
        with _launch_file(launch) if launch is not None else contextlib.nullcontext(stdin) as standard_input:
            self._process = subprocess.Popen(
                list(command),
                env={**(os.environ if environ is None else environ), PARENT_PID_ENV: str(os.getpid())},
                stdin=standard_input,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=own_session,
            )
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
            """A descriptor that is readable once the process has ended."""
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self, within_s: float = 0.0) -> bool:
        """Returns whether the process has ended, or ends within this time, for which it blocks."""
        if self._process.returncode is not None:
            return True
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(int(within_s * 1000)))

    @property
    def ended_by_signal(self) -> bool:
        """Whether a signal ended the process, which must have ended."""
        return self._status() < 0

    def describe_end(self) -> str:
        """Returns the process's name and how it ended. The process must have ended."""
        return f"{self.name} {exit_words(self._status())}"

    def terminate(self) -> None:
        """Sends SIGTERM, unless the process has ended."""
        if self._process.returncode is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process, and to the whole session if that is its own, unless the process has ended."""
        if self._process.returncode is None:
            self._kill_session()
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Returns the exit status once the process has ended; negative for a signal. Safe to cancel."""
        if self._process.returncode is None:
            await _readable(self.pidfd)
        return self._status()

    async def end(self, grace_s: float) -> bool:
        """Waits this long for the process to end by itself, then kills it, also if the wait is cancelled.

        Returns whether the process ended by itself.
        """
        by_itself = True
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            by_itself = False
        finally:
            self.kill()
            await self.wait()
            self._close()
        return by_itself

    def reap(self, grace_s: float) -> None:
        """Does what ``end`` does, but blocks meanwhile."""
        try:
            if not self.ended(grace_s):
                self.kill()
            self._process.wait()
        finally:
            self._close()

    async def output(self) -> bytes:
        """Returns all that the process writes to its standard output, a pipe, until it closes that."""
        async with _reading(self._process.stdout) as stream:
            return await stream.read()

    def _status(self) -> int:
        if self._process.returncode is None:
            # Before wait() gives its number back: what else is in its session has no purpose any more.
            self._kill_session()
            self._process.wait()
        return self._process.returncode

    def _kill_session(self) -> None:
        if self._own_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass(frozen=True, slots=True)
class Listening:
    """The addresses of a server, from its ``listening`` line."""

    url: str
    control: str


_LISTENING = re.compile(r"\bpdserve \w+ listening url=(?P<url>\S+)(?: control=(?P<control>\S+))?")
_LAST_LINES = 20
_MAX_LINE = 64 * 1024


def parse_listening(line: str) -> Listening | None:
    """Returns the addresses in ``pdserve <role> listening url=… [control=…]``; None for any other line."""
    match = _LISTENING.search(as_text(line))
    return Listening(match["url"], match["control"] or "") if match else None


class ServerProcess(ChildProcess):
    """A server in a session of its own, so that Ctrl-C reaches its supervisor alone.

    ``relay`` gets the server's name and each line that it writes, those on ``stderr`` only if that is standard output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        relay: Callable[[str, str], None],
        stderr: int = subprocess.STDOUT,
    ) -> None:
        self.last_line = "starting"
        self._relay = relay
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._listening: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        super().__init__(name, command, environ=environ, stdout=subprocess.PIPE, stderr=stderr, own_session=True)
        self._exit = asyncio.create_task(self._run())

    @property
    def alive(self) -> bool:
        return not self._exit.done()

    @property
    def url(self) -> str:
        """The address that the server has said; empty as long as it has said none."""
        return self._listening.result().url if self._listening.done() else ""

    async def wait(self) -> int:
        """Returns the exit status once the server has ended and all its lines are relayed. Safe to cancel."""
        return await asyncio.shield(self._exit)

    async def listening(self) -> Listening:
        """Returns the server's addresses as soon as it has said them. Raises ChildDied if it ends before."""
        either: list[asyncio.Future[Any]] = [self._listening, self._exit]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.done():
            raise self.died()
        return self._listening.result()

    def died(self) -> ChildDied:
        """Returns an error that tells the server's end and its last lines. The server must have ended."""
        lines = "".join(f"\n    {line}" for line in self._last_lines)
        return ChildDied(self.describe_end() + (f"; its last lines:{lines}" if lines else ""))

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and after ``grace_s`` SIGKILL to all that is left."""
        self.terminate()
        await self.end(grace_s)

    async def _run(self) -> int:
        reading = asyncio.create_task(self._read())
        status = await super().wait()
        await reading
        return status

    async def _read(self) -> None:
        async with _reading(self._process.stdout) as stream:
            async for line in _lines(stream):
                self._take(line)

    def _take(self, line: str) -> None:
        self.last_line = text = as_text(line)
        self._last_lines.append(text)
        found = parse_listening(line)
        if found and not self._listening.done():
            self._listening.set_result(found)
        self._relay(self.name, line)


END_S = 1.0
"""A child that closes its pipes has this long to end, so that the error says how it ended."""


class AnsweringProcess(ChildProcess):
    """A child that answers each order, a line of JSON, with a line, and ends when its standard input does."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None, *, stderr: int | None = None
    ) -> None:
        super().__init__(name, command, environ=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)

    def ask(self, order: object, within_s: float) -> bytes:
        """Returns the answer to ``order``. Raises ChildDied if none comes in this time; blocks."""
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None and answers is not None
        try:
            orders.write(msgspec.json.encode(order) + b"\n")
            orders.flush()
        except OSError as exc:
            raise self._silence() from exc
        # A poller takes any descriptor; select() takes none above 1,023, which a server with many clients reaches.
        poller = select.poll()
        poller.register(answers, select.POLLIN)
        if not poller.poll(int(within_s * 1000)):
            raise ChildDied(f"{self.name} did not answer within {within_s:g} s")
        line: bytes = answers.readline()
        if not line:
            raise self._silence()
        return line

    @property
    def killed(self) -> bool:
        """Whether somebody else has killed it with SIGKILL, as the kernel does where memory is short."""
        return self.ended() and self._status() == -signal.SIGKILL

    def _silence(self) -> ChildDied:
        """Returns why a child that has closed its pipes answers no more."""
        return ChildDied(self.describe_end() if self.ended(END_S) else f"{self.name} has closed its output")

    def reap(self, grace_s: float) -> None:
        """Ends the child's standard input, waits this long for the child to end, and then kills it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # A child that ended before it read anything leaves bytes in the buffer, and closing would write them.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        super().reap(grace_s)
        self._process.stdout.close()


@contextmanager
def _launch_file(launch: object) -> Iterator[int]:
    """Yields a file in no folder that holds ``launch``. Unlike a pipe it never blocks, whatever the reader does."""
    descriptor = os.memfd_create("launch")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(msgspec.msgpack.encode(launch))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


async def _readable(pidfd: int) -> None:
    """Returns when the process has ended; its pipes may still be open elsewhere."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    # A loop has one reader of a descriptor, and several tasks may wait.
    descriptor = os.dup(pidfd)
    try:
        loop.add_reader(descriptor, lambda: None if ended.done() else ended.set_result(None))
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@asynccontextmanager
async def _reading(pipe: IO[bytes] | None) -> AsyncIterator[asyncio.StreamReader]:
    stream = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(stream)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        yield stream
    finally:
        transport.close()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields lines; those above ``_MAX_LINE`` bytes are cut."""
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
    """Returns ``parts`` shares of ``cores``, as even as possible, larger ones first; in turns where cores are too few.

    Two processes that compute on one core cost each other far more than half their speed: shares overlap only then.
    """
    if parts > len(cores):
        return [(cores[index % len(cores)],) for index in range(parts)]
    size, larger = divmod(len(cores), max(parts, 1))
    starts = [index * size + min(index, larger) for index in range(parts + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]


def pin_to_cores(cores: Sequence[int]) -> None:
    """Keeps this process to ``cores``, or to all that it has if there are none. Raises ConfigError if it may not.

    It is called before torch is imported, which sizes its thread pool by the cores that it finds.
    """
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as exc:
            raise ConfigError(f"--cores: cannot run on {list(cores)}: {exc}") from exc


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port that no process listened on just now. Another process may take it first."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def held_port(host: str) -> Iterator[int]:
    """Yields a port that the system gives to no other process within the block.

    A server that allows itself to reuse addresses, as ZMQ and HTTP servers do, can listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]


# ---------------------------------------------------------------- the side that is started

_PR_SET_PDEATHSIG = 1


def die_with_parent(environ: MutableMapping[str, str] = os.environ) -> None:
    """Asks the kernel to kill this process (SIGKILL) when the one that started it is gone, if it was one of pdserve's.

    Ends this process at once if that is gone already. Linux only; elsewhere nothing happens.
    """
    parent = environ.pop(PARENT_PID_ENV, "")
    if not parent.isdecimal() or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)


def read_launch(launch: type[Launch]) -> Launch:
    """Returns the launch message on standard input. From here on this process ends with the one that started it."""
    die_with_parent()
    data = sys.stdin.buffer.read()
    # The message holds the cluster secret, and an open standard input would keep it.
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), sys.stdin.fileno())
    return msgspec.msgpack.decode(data, type=launch)


def set_up_logging(config: LogConfig, process: str, *, node: str = "", prefix: str = "") -> None:
    """Logs to standard error, unless logging has been set up already.

    ``process`` and ``node`` are in each line of JSON, and ``prefix`` is before the message of each line of text.
    """
    logging.basicConfig(level=config.level.name, format=f"%(asctime)s %(levelname)s %(name)s: {prefix}%(message)s")
    if config.format is LogFormat.JSON:
        log_all_as_json(JsonFormatter(process, node))
    # The caller's place in the source and the numbers of its thread and process are in no line.
    logging._srcfile = None  # as the logging documentation has it under "Optimization"
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


_SPARE_FILES = 200


def allow_open_files(connections: int = 0) -> None:
    """Lets this process, and those that it starts, have as many open files as the system allows.

    Raises PdserveError if those are too few for ``connections``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE_FILES if connections else 0
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise PdserveError(
            f"{connections} connections of one process take {needed} open files; the system allows {hard}"
        )
    wanted = max(soft, needed) if hard == resource.RLIM_INFINITY else hard
    if wanted != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


SWITCH_INTERVAL_S = 0.5e-3
"""A thread that computes in Python gives the interpreter's lock away after this time, once another one waits for it."""


def share_interpreter() -> None:
    """Makes threads let others in after ``SWITCH_INTERVAL_S`` instead of Python's 5 ms.

    An event loop that sends tokens is not held up by threads that prepare long prompts. A transfer thread, which gives
    the lock away at each poll of a link while data moves, gets it back in time.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Keeps Python from looking for garbage while libraries load, and afterwards from ever looking at them again.

    The search takes a tenth of the time that loading takes. Later it would delay tokens, and find nothing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


GARBAGE_OBJECTS = 50_000
"""The number of objects, made and not freed, after which Python looks for reference cycles.

Python's own number, 700, is a few requests of a proxy.
"""


def collect_rarely() -> None:
    """Lets Python look for reference cycles seldom, and never among the objects that exist now.

    It is meant for a process whose work leaves next to no cycles, after its imports.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)
