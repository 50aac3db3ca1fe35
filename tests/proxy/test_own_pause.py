"""Tests that a proxy that was stopped, or has more to do than it can, does not take its own lateness for others'."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

from benchmarks.client_process import ask_clients
from benchmarks.proxy.mock_backend import SECRET_ENV, backend_command
from benchmarks.proxy.proxy_clients import ClientLoad, ProxyLoadOrder, ProxyLoadReport
from benchmarks.proxy.systems import MODEL, System, request, stream_body
from pdserve.wire.discovery import Role
from tests.eventually import eventually
from tests.processes import SECRET, Process, clean_environ, pdserve, running

STREAMS = 2000
CHUNKS = 4
WITHIN_S = 40.0
KEPT_S = 1
STOPPED_S = 1.3
"""Longer than the proxy keeps an idle connection, and than it may wait for a connection to a node."""
OK = b"HTTP/1.1 200 OK"


@contextmanager
def proxy_and_backends(*flags: str) -> Iterator[tuple[Process, System]]:
    """Runs a proxy with a decode and a prefill node that answer at once."""
    with ExitStack() as stack:
        ports = ("--port", "0", "--control-port", "0")
        proxy = stack.enter_context(pdserve("proxy", *ports, *flags))
        found = proxy.listening()
        environ = clean_environ(**{SECRET_ENV: SECRET})
        for role in (Role.PREFILL, Role.DECODE):
            stack.enter_context(running(backend_command(role, MODEL, found.control), environ)).listening()
        parts = urlsplit(found.url)
        yield proxy, System("proxy", parts.hostname or "", parts.port or 0, {})


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """Stops the process, which waits for events, until the end of the block, and for ``STOPPED_S`` at least."""
    eventually(lambda: process_state(process.pid) == "S", "it has nothing to do")
    os.kill(process.pid, signal.SIGSTOP)
    until_s = time.monotonic() + STOPPED_S
    try:
        yield
        time.sleep(max(0.0, until_s - time.monotonic()))  # the pause itself is what is tested
    finally:
        os.kill(process.pid, signal.SIGCONT)


def process_state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def connect(to: System) -> socket.socket:
    connection = socket.create_connection((to.host, to.port), WITHIN_S)
    connection.settimeout(WITHIN_S)
    return connection


def ask(connection: socket.socket) -> None:
    connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")


def read_status(connection: socket.socket) -> bytes:
    """Returns the status line of a whole answer, or what came before the connection's end."""
    said = b""
    while not said.endswith(b"}") and (piece := connection.recv(4096)):
        said += piece
    return said.partition(b"\r\n")[0]


def test_requests_that_came_while_the_proxy_stood_still_are_answered() -> None:
    with proxy_and_backends("--keep-alive-s", str(KEPT_S)) as (proxy, system), ExitStack() as stack:
        idle = [stack.enter_context(connect(system)) for _ in range(5)]
        for connection in idle:
            ask(connection)
            assert read_status(connection) == OK
        with stopped(proxy):
            for connection in idle:
                ask(connection)
        assert [read_status(connection) for connection in idle] == [OK] * 5
        assert [connection.recv(1) for connection in idle] == [b""] * 5, "their time is over in the end"


async def test_many_streams_at_once_lose_nothing_to_the_time_that_the_proxy_itself_takes() -> None:
    with proxy_and_backends("--connect-timeout-s", "0.2", "--max-connections", str(STREAMS + 16)) as (proxy, system):
        load = ClientLoad(request(system, stream_body(CHUNKS, 20)), CHUNKS, 1.0, 0.0, True, WITHIN_S)
        order = ProxyLoadOrder(system.host, system.port, STREAMS, load, {})
        report = await ask_clients("benchmarks.proxy.proxy_clients", order, ProxyLoadReport, timeout_s=2 * WITHIN_S)
        assert (report.answered, report.failed, report.errors) == (STREAMS, 0, ())
        assert report.chunks == STREAMS * CHUNKS
        assert "cannot be reached" not in proxy.output
