"""``pdserve top`` in a terminal of its own, at a real proxy: it ends cleanly, and gives the terminal back."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from pdserve_proxy.status.report import StatusReport
from tests.cli.in_process import call
from tests.processes import clean_environ, pdserve

pytestmark = pytest.mark.integration

KEY = "a-key-of-a-client"
WAIT_S = 60.0
ALTERNATE, BACK = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    with pdserve("proxy", "--port", "0", "--control-port", "0", "--api-key", KEY) as process:
        yield process.listening().url


def top(*flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pdserve", "top", *flags]


@dataclass
class Terminal:
    """``pdserve top`` with the other end of its terminal."""

    process: subprocess.Popen[bytes]
    master: int
    slave: int
    seen: bytes = b""

    def until(self, wanted: Callable[[bytes], bool]) -> None:
        """Reads what is drawn until it is as ``wanted``."""
        deadline = time.monotonic() + WAIT_S
        while not wanted(self.seen):
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.master], [], [], left)[0], self.seen
            self.seen += os.read(self.master, 65536)

    def mode(self) -> int:
        flags: int = termios.tcgetattr(self.slave)[3]
        return flags & (termios.ICANON | termios.ECHO)


@contextmanager
def terminal(url: str) -> Iterator[Terminal]:
    master, slave = os.openpty()
    process = subprocess.Popen(
        top("--proxy-url", url, "--api-key", KEY, "--interval-s", "0.1"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=clean_environ(TERM="xterm"),
        start_new_session=True,
    )
    try:
        yield Terminal(process, master, slave)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


def _quit(one: Terminal) -> None:
    os.write(one.master, b"q")


def _interrupt(one: Terminal) -> None:
    one.process.send_signal(signal.SIGINT)


def _terminate(one: Terminal) -> None:
    one.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("end", [_quit, _interrupt, _terminate])
def test_it_ends_and_gives_the_terminal_back(proxy: str, end: Callable[[Terminal], None]) -> None:
    with terminal(proxy) as one:
        before = one.mode()
        one.until(lambda seen: seen.count(b"no node is registered") >= 2)
        assert one.mode() != before
        assert one.seen.count(ALTERNATE) == 1 and BACK not in one.seen
        end(one)
        one.until(lambda seen: seen.endswith(BACK))
        assert one.process.wait(WAIT_S) == 0
        assert one.mode() == before
        assert b"Traceback" not in one.seen


def test_a_proxy_that_goes_is_said_and_one_that_comes_back_is_shown_again() -> None:
    with pdserve("proxy", "--port", "0", "--control-port", "0") as first:
        url = first.listening().url
        with terminal(url) as one:
            one.until(lambda seen: b"no node is registered" in seen)
            first.terminate()
            one.until(lambda seen: b"no answer from" in seen)
            with pdserve("proxy", "--port", url.rpartition(":")[2], "--control-port", "0"):
                one.until(
                    lambda seen: b"no answer from" not in seen.rpartition(b"\x1b[H")[2] and seen.endswith(b"\x1b[J")
                )
            _quit(one)
            assert one.process.wait(WAIT_S) == 0


def test_without_a_terminal_it_prints_reports(proxy: str) -> None:
    flags = ("--proxy-url", proxy, "--api-key", KEY, "--interval-s", "0.1")
    done = call("top", *flags, "--once", "--json")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert msgspec.json.decode(line, type=StatusReport).nodes == ()
    done = call("top", "--proxy-url", proxy, "--once")
    assert done.returncode == 1
    assert "an API key is needed" in done.stderr and KEY not in done.stderr
    assert "--api-key-file names a file with a key, and PDSERVE_API_KEY is one" in done.stderr


def test_whoever_reads_may_stop_reading(proxy: str) -> None:
    process = subprocess.Popen(
        top("--proxy-url", proxy, "--api-key", KEY, "--interval-s", "0.1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environ(),
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert re.match(rb"pdserve \d", process.stdout.readline())
        process.stdout.close()
        assert (process.wait(WAIT_S), process.stderr.read()) == (0, b"")
