"""A benchmark's clients as a process of their own: an order on its standard input, a report on its standard output.

``allow_open_files`` lets a process have as many open files as its connections take.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pdserve.errors import BenchError, PdserveError
from pdserve.process import die_with_parent

_SPARE = 200


def allow_open_files(connections: int) -> None:
    """For this process and those that it starts. Raises BenchError if the system does not allow enough."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchError(f"{connections} connections of one process take {needed} open files; the system allows {hard}")
    soft = needed if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


Order = TypeVar("Order")
Report = TypeVar("Report")


async def ask_clients(module: str, order: object, report: type[Report], timeout_s: float) -> Report:
    """Runs ``python -m module``, whose main is ``serve_order``. Raises BenchError if it fails or takes too long."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            told, _ = await process.communicate(msgspec.msgpack.encode(order))
    except TimeoutError as exc:
        raise BenchError(f"the clients were not done after {timeout_s:g} s") from exc
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(f"the clients ended with status {process.returncode}")
    return msgspec.msgpack.decode(told, type=report)


def serve_order(order: type[Order], run: Callable[[Order], object]) -> int:
    """The exit status of a process that does what it is ordered, and ends with the one that asked."""
    die_with_parent(os.getppid())
    try:
        report = run(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=order))
    except (PdserveError, OSError) as exc:
        print(f"clients: {exc}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.msgpack.encode(report))
    return 0
