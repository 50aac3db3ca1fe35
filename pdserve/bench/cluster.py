"""Starts a whole cluster on this machine for a benchmark: a proxy, and nodes that divide the cores between them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp

from pdserve.bench.observation import until_known
from pdserve.bench.programs import OWN_SETTINGS, Program, Running, child_of, running
from pdserve.process import partition_cores, pdserve_command
from pdserve.wire.discovery import Role


@dataclass(frozen=True, slots=True)
class BenchCluster:
    """A running cluster, as its benchmark sees it."""

    url: str
    """The URL of its proxy."""
    proxy: int
    """The process id of the proxy."""
    nodes: Mapping[str, Running]
    """The nodes, by their names: ``prefill-0``, ``decode-1``."""

    def engine(self, node: str) -> int:
        """Returns the process id of a node's engine."""
        return child_of(self.nodes[node].pid)

    def pids(self) -> dict[str, int]:
        """Returns the ids of all processes, by name."""
        api = {node: running.pid for node, running in self.nodes.items()}
        engines = {f"{node} engine": self.engine(node) for node in self.nodes}
        return {"proxy": self.proxy, **api, **engines}


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
