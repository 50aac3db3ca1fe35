"""Real pdserve processes for tests: they are started, read from, and always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pdserve.process import PARENT_PID_ENV, Listening, parse_listening

SECRET = "a-secret-for-tests-only-0123456789"

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


class Process:
    """A running program whose output (both streams) is collected line by line."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.argv = list(argv)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.popen = subprocess.Popen(
            self.argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        with self._changed:
            return "\n".join(self.lines)

    def wait_for(self, wanted: Callable[[str], object], timeout_s: float = START_TIMEOUT_S) -> str:
        """Returns the first line, of those so far and those to come, for which ``wanted`` is true.

        Fails the test if the output ends first or time runs out.
        """
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    if wanted(line):
                        return line
                seen = len(self.lines)
                if self._ended:
                    raise AssertionError(f"{self.argv} ended before the line came:\n" + "\n".join(self.lines))
                if not self._changed.wait(deadline - time.monotonic()):
                    raise AssertionError(f"{self.argv}: no such line in {timeout_s} s:\n" + "\n".join(self.lines))

    def listening(self, timeout_s: float = START_TIMEOUT_S) -> Listening:
        """Returns the process's addresses as soon as it has printed them."""
        found = parse_listening(self.wait_for(parse_listening, timeout_s))
        assert found is not None
        return found

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Returns the exit status. Fails the test if the process does not end in time."""
        try:
            status = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(f"{self.argv} did not end in {timeout_s} s:\n{self.output}") from exc
        self._reader.join(STOP_TIMEOUT_S)
        return status

    def reap(self) -> None:
        """Ends the process and all of its process group, whatever state they are in."""
        if self.popen.poll() is None:
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        if self.popen.stdout is not None:
            self.popen.stdout.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def end_together(processes: Sequence[Process]) -> None:
    """Ends processes together, which is quicker than one after the other. Their own blocks end those that are left."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, deadline - time.monotonic()))


def clean_environ(**more: str) -> dict[str, str]:
    """Returns this process's environment without what sets pdserve or the threads of its engines, plus ``more``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "OMP_NUM_"))}
    return own | more


@contextmanager
def running(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Process]:
    """Runs a program, and ends it at the end of the block."""
    process = Process(argv, environ)
    try:
        yield process
    finally:
        process.reap()


@contextmanager
def pdserve(
    *argv: str, prefix: Sequence[str] = (), module: str = "", program: Sequence[str] = (), **environ: str
) -> Iterator[Process]:
    """Runs ``pdserve <argv>`` with the tests' secret, and ends it at the end of the block or with this process.

    ``prefix`` is a command such as ``ip netns exec``, which replaces itself by the command that follows. ``module`` is
    a program of the tests that takes the same arguments, and ``program`` is a whole command that does.
    """
    own = {"PDSERVE_SECRET": SECRET, PARENT_PID_ENV: str(os.getpid())}
    started = program or [sys.executable, *(["-m", module] if module else ["-P", "-m", "pdserve"])]
    command = [*prefix, *started, *argv]
    with running(command, clean_environ(**{**own, **environ})) as process:
        yield process


def lean_torch_command(module: str, *args: str) -> tuple[str, ...]:
    """Returns the command that calls ``main`` of ``module`` with ``args``, in a process with the torch of an engine."""
    program = f"""
import sys
from pdserve.models.lean_torch import import_torch
import_torch()
from {module} import main
main(*sys.argv[1:])
"""
    return (sys.executable, "-c", program, *args)


def alive(pid: int) -> bool:
    """Returns whether there is a process with this id that has not ended."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def cluster_processes(marker: str) -> set[int]:
    """Returns the processes other than this one that have ``marker`` in their environment, as children inherit it."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if marker.encode() in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
    return found


def wait_until_gone(marker: str, timeout_s: float = 20.0) -> None:
    """Returns when no process has ``marker`` in its environment. Fails the test if one still has after this time."""
    deadline = time.monotonic() + timeout_s
    while left := cluster_processes(marker):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def command_has(pid: int, word: str) -> bool:
    """Returns whether ``word`` is one of the words that the process was started with."""
    return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
