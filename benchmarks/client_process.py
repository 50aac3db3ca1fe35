"""Runs a benchmark's clients in their own process, which reads an order from stdin and writes a report to stdout.

``connect`` and ``receive`` are for clients that poll their sockets themselves.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from benchmarks.programs import study_program
from pdserve.errors import BenchError, PdserveError
from pdserve.process import ChildProcess, read_launch

_CONNECT_TIMEOUT_S = 30.0

Order = TypeVar("Order")
Report = TypeVar("Report")


async def ask_clients(module: str, order: object, report: type[Report], timeout_s: float) -> Report:
    """Runs ``module``, a program whose main is ``serve_order``. Raises BenchError if it fails or takes too long."""
    clients = ChildProcess("the clients", study_program(module), launch=order, stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(timeout_s):
            encoded = await clients.output()
            status = await clients.wait()
    except TimeoutError as exc:
        raise BenchError(f"the clients were not done after {timeout_s:g} s") from exc
    finally:
        await clients.end(0.0)
    if status:
        raise BenchError(clients.describe_end())
    return msgspec.msgpack.decode(encoded, type=report)


def serve_order(order: type[Order], run: Callable[[Order], object]) -> int:
    """Carries out the order on standard input and returns the exit status of this process."""
    try:
        report = run(read_launch(order))
    except (PdserveError, OSError) as exc:
        print(f"clients: {exc}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.msgpack.encode(report))
    return 0


def connect(host: str, port: int) -> socket.socket:
    """Returns an open connection. Raises OSError."""
    return socket.create_connection((host, port), _CONNECT_TIMEOUT_S)


def receive(connection: socket.socket, most: int) -> bytes:
    """Returns the bytes that have come, at most ``most``; none if the connection has ended, in whatever way."""
    try:
        return connection.recv(most)
    except ConnectionError:
        return b""
