"""A benchmark's clients as a process of their own: an order on its standard input, a report on its standard output."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pdserve.errors import BenchError, PdserveError
from pdserve.parent import die_with_parent

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
