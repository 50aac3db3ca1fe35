"""One pdserve node for a benchmark, as a real process."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from pdserve.child import Child, command
from pdserve.errors import BenchError

_GRACE_S = 10.0
_OWN = {
    "PDSERVE_HOST": "127.0.0.1",
    "PDSERVE_PORT": "0",
    "PDSERVE_ADVERTISE": "",
    "PDSERVE_PROXY": "",
    "PDSERVE_SECRET_FILE": "",
    "PDSERVE_LOG_LEVEL": "info",
}
"""Whatever the environment says: a node of a benchmark serves the benchmark alone, and says where it listens."""


@asynccontextmanager
async def running_node(
    name: str, flags: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> AsyncIterator[str]:
    """The URL of a ``pdserve mixed`` that is ready, with ``flags`` and the settings of ``environ``.

    Raises BenchError if it is not ready in time, and ChildDied if it ends.
    """

    def relay(name: str, line: str) -> None:
        if " INFO " not in line:
            print(f"{name} | {line}", file=sys.stderr, flush=True)

    own = {**environ, **_OWN, "PDSERVE_SECRET": secrets.token_hex(32)}
    node = Child(name, command("mixed", *flags), own, relay)
    try:
        yield await _url(node, timeout_s)
    finally:
        await node.stop(_GRACE_S)


async def _url(node: Child, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            # A node says that it listens once its engine is ready.
            return (await node.listening()).url
    except TimeoutError as exc:
        raise BenchError(f"{node.name} was not ready after {timeout_s:g} s; its last line: {node.last_line}") from exc
