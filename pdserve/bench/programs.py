"""Starts real processes of pdserve for a benchmark."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import BenchError
from pdserve.process import Listening, ServerProcess, pdserve_command

_GRACE_S = 10.0
OWN_SETTINGS = {
    "PDSERVE_HOST": "127.0.0.1",
    "PDSERVE_PORT": "0",
    "PDSERVE_ADVERTISE": "",
    "PDSERVE_PROXY": "",
    "PDSERVE_SECRET_FILE": "",
    "PDSERVE_LOG_LEVEL": "info",
}
"""These variables override the environment: a benchmark's nodes serve only the benchmark, and log where they listen."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server to start, which writes a ``listening`` line like all of pdserve's servers."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Running:
    """A program that takes connections."""

    pid: int
    listening: Listening


@asynccontextmanager
async def running_node(
    name: str, flags: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> AsyncIterator[str]:
    """Yields the URL of a ready ``pdserve mixed`` with ``flags`` and the settings of ``environ``.

    Raises BenchError if it is not ready in time, and ChildDied if it ends.
    """
    own = {**environ, **OWN_SETTINGS, "PDSERVE_SECRET": secrets.token_hex(32)}
    async with running([Program(name, pdserve_command("mixed", *flags), own)], timeout_s) as (node,):
        yield node.listening.url


@asynccontextmanager
async def running(programs: Sequence[Program], timeout_s: float) -> AsyncIterator[list[Running]]:
    """Starts all ``programs`` at once, each with ``timeout_s`` to be ready. Their warnings go to standard error.

    Raises BenchError if one is not ready in time, and ChildDied if one ends.
    """

    def relay(name: str, line: str) -> None:
        if " INFO " not in line:
            print(f"{name} | {line}", file=sys.stderr, flush=True)

    children: list[ServerProcess] = []
    try:
        for program in programs:
            children.append(ServerProcess(program.name, program.argv, program.environ, relay))
        yield [Running(child.pid, await _listening(child, timeout_s)) for child in children]
    finally:
        await asyncio.gather(*(child.stop(_GRACE_S) for child in children))


async def _listening(child: ServerProcess, timeout_s: float) -> Listening:
    try:
        async with asyncio.timeout(timeout_s):
            # A node writes its ``listening`` line once its engine is ready.
            return await child.listening()
    except TimeoutError as exc:
        raise BenchError(f"{child.name} was not ready after {timeout_s:g} s; its last line: {child.last_line}") from exc


def child_of(pid: int) -> int:
    """Returns the oldest process that the main thread of ``pid`` started. Raises BenchError if there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError as exc:
        raise BenchError(f"process {pid} is gone: {exc.strerror}") from exc
    if not children:
        raise BenchError(f"process {pid} has no children")
    return int(children[0])
