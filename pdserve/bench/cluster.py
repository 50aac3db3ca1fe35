"""Starts real servers on this machine for a benchmark, up to whole clusters, and reads what running servers say.

``running`` starts programs, ``running_node`` a node, and ``running_cluster`` a proxy with nodes that divide the cores.
``known_nodes`` and ``read_metrics`` look at servers that run, whoever has started them.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import BenchError
from pdserve.process import Listening, ServerProcess, partition_cores, pdserve_command
from pdserve.wire.discovery import Role

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


@dataclass(frozen=True, slots=True)
class BenchCluster:
    """A running cluster, as its benchmark sees it."""

    url: str
    """The URL of its proxy."""
    proxy: int
    """The process id of the proxy."""
    nodes: Mapping[str, Running]
    """The nodes, by their names: ``prefill-0``, ``decode-1``."""


@asynccontextmanager
async def running_cluster(
    label: str, roles: Sequence[Role], cores: Sequence[int], environ: Mapping[str, str], timeout_s: float
) -> AsyncIterator[BenchCluster]:
    """Yields a cluster with a node for each of ``roles``, once its proxy knows all of them.

    ``label`` stands before the warnings of its processes. Raises BenchError if the cluster is not ready in time, and
    ChildDied if one of its processes ends.
    """
    own = {**environ, **OWN_SETTINGS, "PDSERVE_SECRET": secrets.token_hex(32)}
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(programs: Sequence[Program]) -> list[Running]:
            return await stack.enter_async_context(running(programs, timeout_s))

        (proxy,) = await start([Program(f"{label}, proxy", pdserve_command("proxy", "--control-port", "0"), own)])
        names, programs = [], []
        for number, (role, share) in enumerate(zip(roles, partition_cores(cores, len(roles)), strict=True)):
            names.append(f"{role.value}-{number}")
            flags = ["--name", names[-1], "--cores", ",".join(map(str, share))]
            argv = pdserve_command(role.value, "--proxy", proxy.listening.control, *flags)
            programs.append(Program(f"{label}, {names[-1]}", argv, own))
        nodes = dict(zip(names, await start(programs), strict=True))
        await until_known(session, proxy.listening.url, len(nodes), timeout_s)
        yield BenchCluster(proxy.listening.url, proxy.pid, nodes)


_ASKING_S = 0.05
_MAX_BYTES = 64 * 2**20
"""No answer about nodes or counts is longer."""


class NodeAddress(msgspec.Struct, frozen=True):
    """The part of an entry of a proxy's ``/instances`` that is read here."""

    name: str
    url: str


_known = msgspec.json.Decoder(list[NodeAddress])


async def known_nodes(session: aiohttp.ClientSession, proxy_url: str) -> list[NodeAddress]:
    """Returns the nodes that a proxy knows now."""
    return _known.decode(await _body(session, f"{proxy_url}/instances"))


async def until_known(session: aiohttp.ClientSession, proxy_url: str, count: int, timeout_s: float) -> None:
    """Waits until a proxy knows ``count`` nodes. Raises BenchError if that takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if len(await known_nodes(session, proxy_url)) == count:
                    return
                await asyncio.sleep(_ASKING_S)
    except TimeoutError as exc:
        raise BenchError(f"the proxy did not know {count} nodes after {timeout_s:g} s") from exc


async def read_metrics(session: aiohttp.ClientSession, url: str) -> str:
    """Returns the metrics of the server at ``url``, as its ``/metrics`` has them."""
    return (await _body(session, f"{url}/metrics")).decode(errors="replace")


async def _body(session: aiohttp.ClientSession, url: str) -> bytes:
    """Returns what is at ``url``. Raises aiohttp.ClientError, also for an error status, and BenchError."""
    body = bytearray()
    async with session.get(url) as response:
        response.raise_for_status()
        async for part in response.content.iter_any():
            body += part
            if len(body) > _MAX_BYTES:
                raise BenchError(f"{url} has more than {_MAX_BYTES // 2**20} MiB")
    return bytes(body)


def total(metrics: str, name: str, **labels: str) -> float:
    """Returns the sum of the samples of ``name`` that have these labels; 0 if there are none."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())
