"""Tests the processes of ``pdserve up``, with small programs in place of nodes."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from pdserve.process import (
    AnsweringProcess,
    ChildDied,
    Listening,
    ServerProcess,
    allow_open_files,
    held_port,
    loading_libraries,
    parse_listening,
)
from tests.processes import clean_environ, running

LISTENING = (
    "import sys, time\nprint('x pdserve decode listening url=http://127.0.0.1:7', file=sys.stderr, flush=True)\n"
)
SLEEP = "time.sleep(60)\n"
SELECT_FILES = 1_024
"""select() takes no descriptors above these."""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def start(program: str, lines: list[tuple[str, str]] | None = None) -> ServerProcess:
    kept = [] if lines is None else lines
    return ServerProcess(
        "node", [sys.executable, "-c", program], clean_environ(), lambda name, line: kept.append((name, line))
    )


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pdserve proxy listening url=http://a:1 control=tcp://a:2", Listening("http://a:1", "tcp://a:2")),
        ("2026 INFO x: pdserve decode listening url=http://a:1", Listening("http://a:1", "")),
        ("pdserve decode draining", None),
        ("listening url=http://a:1", None),
    ],
)
def test_the_listening_line(line: str, expected: Listening | None) -> None:
    assert parse_listening(line) == expected


async def test_it_listens_then_stops_and_its_lines_are_relayed() -> None:
    lines: list[tuple[str, str]] = []

    async with asyncio.timeout(30):
        child = start(LISTENING + SLEEP, lines)
        assert await child.listening() == Listening("http://127.0.0.1:7", "")
        before = child.alive
        await child.stop(grace_s=10)
        assert (before, child.alive) == (True, False)
        assert await child.wait() == -signal.SIGTERM
    assert lines == [("node", "x pdserve decode listening url=http://127.0.0.1:7")]


async def test_an_early_end_is_told_with_its_last_lines() -> None:
    async with asyncio.timeout(30):
        child = start("print('no memory'); raise SystemExit(3)")
        with pytest.raises(ChildDied, match=r"node ended with status 3; its last lines:\n    no memory"):
            await child.listening()
        await child.stop(grace_s=1)


async def test_one_that_ignores_sigterm_is_killed() -> None:
    async with asyncio.timeout(30):
        child = start(STUBBORN + LISTENING + SLEEP)
        await child.listening()
        await child.stop(grace_s=0.2)
        assert await child.wait() == -signal.SIGKILL


async def test_its_own_children_end_with_it_and_do_not_hold_it_up() -> None:
    """The grandchild keeps the pipe open, and the end of the child is noticed anyway."""
    program = (
        "import subprocess, sys, os, signal\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(inner.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    lines: list[tuple[str, str]] = []

    async with asyncio.timeout(30):
        child = start(program, lines)
        status = await child.wait()
        await child.stop(grace_s=1)
        assert status == -signal.SIGKILL
    assert gone(int(lines[0][1]))


async def test_long_lines_and_broken_text_pass() -> None:
    lines: list[tuple[str, str]] = []

    async with asyncio.timeout(30):
        child = start("import sys; sys.stdout.buffer.write(b'a' * 200_000 + b'\\n\\xff\\nlast')", lines)
        await child.wait()
    texts = [line for _, line in lines]
    assert sum(text.count("a") for text in texts[:-1]) == 200_000
    assert texts[-2:] == ["\N{REPLACEMENT CHARACTER}", "last"]


def test_a_killed_parent_takes_its_pdserve_along() -> None:
    parent = (
        "import os, subprocess, sys\n"
        "environ = {**os.environ, 'PDSERVE_PARENT_PID': str(os.getpid())}\n"
        "argv = [sys.executable, '-P', '-m', 'pdserve', 'proxy', '--port', '0', '--control-port', '0']\n"
        "child = subprocess.Popen(argv, env=environ, start_new_session=True)\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with running([sys.executable, "-c", parent], clean_environ(PDSERVE_SECRET="x" * 16)) as process:
        pid = int(process.wait_for(lambda line: line.startswith("child ")).split()[1])
        process.listening()
        os.kill(process.pid, signal.SIGKILL)
        assert gone(pid)


def test_a_process_with_many_open_files_gets_answers() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_open_files(SELECT_FILES)
    try:
        with ExitStack() as files:
            for _ in range(SELECT_FILES):
                files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            child = AnsweringProcess("echo", ["cat"], clean_environ())
            try:
                assert child.ask([1], 30.0) == b"[1]\n"
                with pytest.raises(ChildDied, match="did not answer"):
                    os.kill(child.pid, signal.SIGSTOP)
                    child.ask([2], 0.01)
            finally:
                child.reap(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_port_that_is_held_is_free_for_its_server_alone() -> None:
    with held_port("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
            server.bind(f"tcp://127.0.0.1:{port}")


def test_what_libraries_leave_is_never_searched_for_garbage() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), loading_libraries():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
