"""Programs as forks of a process that has loaded their modules, which start in a small part of the time.

``python -m tests.forks SOCKET MODULES`` is that process. A program is started as any other, by a command: its process
has the program run by a fork, with the same arguments, environment and descriptors, passes SIGTERM, SIGINT and SIGHUP
on to it, and ends as the fork ends. When it is killed, so are the fork and all that the fork has started.

Other signals, and whatever asks for the process's memory or threads, do not reach the program: ``program_of`` returns
the process that they are for.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from pdserve.process import PARENT_PID_ENV, die_with_parent
from tests.processes import clean_environ, running

_LARGEST = 100_000
_DESCRIPTORS = 1_000
"""More than the process with the modules ever has."""
_MOST_PASSED = 16
_LISTENS = "listens"
_READS_ENVIRONMENT = {"huggingface_hub.constants"}
"""Modules that read the environment when they are loaded. A fork loads them again."""
_ROOT = str(Path(__file__).parents[1])

# It runs without the folder of packages, which it would take longer to find than all that it does.
_CLIENT = """
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: connection.send(bytes([number])))
connection.connect(sys.argv[1])
numbers = [int(name) for name in os.listdir("/dev/fd") if os.path.lexists("/dev/fd/" + name)]
numbers.remove(connection.fileno())
order = {"argv": sys.argv[2:], "environ": dict(os.environ), "parent": os.getppid(), "descriptors": numbers}
socket.send_fds(connection, [json.dumps(order).encode()], numbers)
with open("/proc/self/comm", "wb", 0) as name:
    name.write(connection.recv(100))
status = json.loads(connection.recv(100) or "1")
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@dataclass(frozen=True)
class Forks:
    """A running process whose forks run programs."""

    socket: str

    def command(self, module: str, *args: str) -> list[str]:
        """Returns the command that runs ``module`` as ``python -m`` does."""
        return [sys.executable, "-I", "-S", "-c", _CLIENT, self.socket, module, *args]


def program_of(pid: int) -> int:
    """Returns the fork that runs the program of this process, or ``pid`` if the process runs it itself."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name) if name.isdecimal() else pid


@contextmanager
def forks_of(*modules: str, **environ: str) -> Iterator[Forks]:
    """Yields a process that loads these modules before its first fork, with ``environ`` in its environment."""
    with TemporaryDirectory() as folder:
        path = str(Path(folder, "socket"))
        command = [sys.executable, "-m", __name__, path, *modules]
        with running(command, clean_environ(**{PARENT_PID_ENV: str(os.getpid()), **environ})) as process:
            process.wait_for(lambda line: line == _LISTENS)
            yield Forks(path)


@dataclass(frozen=True)
class _Child:
    pid: int
    ends_with: int
    """The fork that started the program and wants it to end with itself; 0 if there is none."""


class _Server:
    def __init__(self, path: str, modules: Sequence[str]) -> None:
        self._unloaded = tuple(modules)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._children: dict[socket.socket, _Child] = {}

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                # An earlier event of this turn may have ended what this one is about.
                if key.fileobj in self._selector.get_map():
                    key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        connection = listener.accept()[0]
        data, descriptors, *_ = socket.recv_fds(connection, _LARGEST, _MOST_PASSED)
        if not data:
            connection.close()
            return
        order = json.loads(data)
        self._load(descriptors)
        if not (pid := os.fork()):
            _become(order["argv"], order["environ"], dict(zip(order["descriptors"], descriptors, strict=True)))
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):
            connection.send(str(pid).encode())
        self._children[connection] = _Child(pid, order["parent"] if PARENT_PID_ENV in order["environ"] else 0)
        pidfd = os.pidfd_open(pid)
        self._selector.register(connection, selectors.EVENT_READ, self._signalled)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda pidfd: self._ended(connection, pidfd))

    def _load(self, descriptors: Sequence[int]) -> None:
        """Loads the modules, if this is the first program. If that fails, this is what the program says."""
        if not self._unloaded:
            return
        try:
            for module in self._unloaded:
                importlib.import_module(module)
        except BaseException:
            for descriptor in descriptors[:3]:
                with suppress(OSError):
                    os.write(descriptor, traceback.format_exc().encode())
            raise
        self._unloaded = ()
        # The forks share the pages of what never changes.
        gc.collect()
        gc.freeze()

    def _signalled(self, connection: socket.socket) -> None:
        pid = self._children[connection].pid
        data = b""
        with suppress(OSError):
            data = connection.recv(1)
        if data:
            os.kill(pid, data[0])
        else:
            self._selector.unregister(connection)
            # The fork leads a group, unless it has not come so far yet.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.killpg(pid, signal.SIGKILL)

    def _ended(self, connection: socket.socket, pidfd: int) -> None:
        pid = self._children.pop(connection).pid
        # What it has left behind, as if the program's own process had been the leader of the group.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for other in self._children.values():
            if other.ends_with == pid:
                os.kill(other.pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        with suppress(OSError):
            connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def _become(argv: Sequence[str], environ: dict[str, str], descriptors: dict[int, int]) -> NoReturn:
    """Runs a program in this process, which is a fork, and ends it.

    ``descriptors`` has those that the program is given: by its numbers, those that they have here.
    """
    status = 1
    try:
        os.setsid()
        # A number of one may be what another one has here.
        aside = {
            number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, _DESCRIPTORS) for number, descriptor in descriptors.items()
        }
        os.closerange(0, _DESCRIPTORS)
        for number, descriptor in aside.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        parent = {PARENT_PID_ENV: str(os.getppid())}
        die_with_parent(dict(parent))
        os.environ.clear()
        os.environ.update(environ | (parent if PARENT_PID_ENV in environ else {}))
        for name in _READS_ENVIRONMENT & sys.modules.keys():
            importlib.reload(sys.modules[name])
        if not argv[0].startswith("tests."):
            sys.path.remove(_ROOT)
        sys.argv = list(argv)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = _status_of(ended.code)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(status)


def _status_of(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def main(path: str, *modules: str) -> NoReturn:
    die_with_parent()
    server = _Server(path, modules)
    print(_LISTENS, flush=True)
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
