"""The supervisor behind ``pdserve up``: plans the processes of a cluster on this machine, brings them up, starts again
those that die, and stops all in order.

The plan says which nodes there are, on which cores and with which command lines. It starts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pdserve.cli.up.kernel_compiler import nothing_compiled
from pdserve.cli.up.output import Console
from pdserve.cli.up.supervised_server import SupervisedServer
from pdserve.compiled_library import Compiling
from pdserve.config import ClusterConfig, HttpConfig, LogLevel, NodeConfig, Switch, UpConfig
from pdserve.process import ChildDied, Listening, ServerProcess, held_port, partition_cores, pdserve_command
from pdserve.serving import Node
from pdserve.settings import load, to_environ
from pdserve.wire.discovery import NodeSizes, Role

LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE = "lo"
"""By default UCX listens on every network device, and it does not authenticate those who connect."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node process that is to be started."""

    name: str
    role: Role
    cores: tuple[int, ...]


def plan_nodes(cluster: ClusterConfig, cores: Sequence[int]) -> list[NodePlan]:
    """Returns the nodes of ``cluster``, prefill nodes first, with ``cores`` divided between them."""
    counts = {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode, Role.MIXED: cluster.mixed}
    named = [(role, f"{role.value}-{index}") for role, count in counts.items() for index in range(count)]
    return [
        NodePlan(name, role, own) for (role, name), own in zip(named, partition_cores(cores, len(named)), strict=True)
    ]


def proxy_command(http: HttpConfig, control_port: int, before: Listening | None = None) -> Sequence[str]:
    """Returns the command that starts the proxy, at the URL that it had ``before`` if it is started again."""
    port = http.port if before is None else urlsplit(before.url).port
    return pdserve_command("proxy", "--host", http.host, "--port", str(port), "--control-port", str(control_port))


def node_command(node: NodePlan, control: str) -> Sequence[str]:
    cores = ",".join(str(core) for core in node.cores)
    return pdserve_command(node.role.value, "--name", node.name, "--proxy", control, "--cores", cores, "--port", "0")


def child_environ(
    config: UpConfig, environ: Mapping[str, str], secret: str, file: str, core_ledger: Path | None = None
) -> dict[str, str]:
    """Returns every child's environment: ``environ`` with the settings of ``config`` in it.

    The nodes lend each other their cores by ``core_ledger``, or not at all. A ledger that ``environ`` or ``file`` names
    is shared with engines of other clusters, and goes before it.

    Whatever the environment says, addresses are loopback ones and ports are free ones. The proxy's flags say where
    clients connect.
    """
    inner = dataclasses.replace(config.http, host=LOOPBACK, port=0, advertise="")
    # The line with a process's addresses is an INFO line; the console hides what the user does not want to see.
    level = LogLevel.DEBUG if config.log.level is LogLevel.DEBUG else LogLevel.INFO
    log = dataclasses.replace(config.log, level=level)
    settings = to_environ(dataclasses.replace(config, http=inner, log=log))
    defaults = to_environ(NodeConfig())
    private = {name: defaults[name] for name in _OWN_ADDRESSES}
    private["PDSERVE_CONTROL_HOST"] = LOOPBACK
    private["PDSERVE_UCX_NET_DEVICES"] = LOOPBACK_DEVICE
    own = {**settings, **private, "PDSERVE_SECRET": secret, "PDSERVE_SECRET_FILE": ""}
    if file:
        own["PDSERVE_CONFIG"] = file
    if config.cluster.lend_cores is Switch.OFF:
        own[_CORE_LEDGER] = ""
    elif core_ledger is not None:
        named = load(NodeConfig, [], {**environ, **own}, prog="pdserve decode").cpu.core_ledger
        own[_CORE_LEDGER] = named or str(core_ledger)
    return {**environ, **own}


_CORE_LEDGER = "PDSERVE_CORE_LEDGER"
_OWN_ADDRESSES = ("PDSERVE_TRANSFER_HOST", "PDSERVE_TRANSFER_PORT", "PDSERVE_TRANSFER_ADVERTISE")

_STAGE = re.compile(r" INFO \S+ (?:engine: (?P<stage>.*)|pdserve \w+ listening )")
_STAGES = ("loading libraries", "preparing kernels", "loading weights", "warming up", "recording", "joining")
"""What a node says while it starts, in this order."""
_SHOWN_NODES = 6
_POLL_S = 0.2
_REPORT_S = 5.0
_STOP_MARGIN_S = 15.0
"""Seconds that the proxy has after the drain, for last error events and for its own end."""
_NODE_GRACE_S = 15.0
"""Seconds for the end of a node that has nothing to do any more."""
_LOOK_S = 2.0
_COUNT_S = 1.0
_UNDER_WAY = re.compile(r"^pdserve_proxy_requests_in_flight (\S+)$", re.MULTILINE)


class LocalCluster:
    """One proxy and its nodes. The caller has to await ``stop`` in the end, whatever happened before."""

    def __init__(
        self,
        console: Console,
        http: HttpConfig,
        tls: ssl.SSLContext | None = None,
        compiling: Callable[[], Compiling | None] = nothing_compiled,
        expected_s: float | None = None,
    ) -> None:
        """``http`` says where the proxy listens. ``tls`` is for requests to the proxy, if it serves HTTPS.

        ``compiling`` returns how far the compiler of the CPU kernels is; None if nothing is compiled. The last start
        took ``expected_s``, if anybody knows.
        """
        self._expected_s = expected_s
        self.compiled = False
        """Whether kernels were compiled during the start."""
        self._console = console
        self._compiling = compiling
        self._http = http
        self._tls = tls
        self._proxy: SupervisedServer | None = None
        self._nodes: dict[str, tuple[NodePlan, SupervisedServer]] = {}
        self._stages: dict[str, str] = {}
        self._found = Listening("", "")
        self._control_port = 0

    @property
    def url(self) -> str:
        """The proxy's URL, once the cluster is ready."""
        return self._found.url

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, with the addresses and processes that they have now. They must have been ready once."""
        return tuple(
            Node(plan.name, plan.role, server.url, server.process.pid) for plan, server in self._nodes.values()
        )

    async def start(self, nodes: Sequence[NodePlan], environ: Mapping[str, str]) -> None:
        """Returns when the proxy has every node and is ready. Raises ChildDied if a process ends meanwhile.

        This method has no time limit of its own: the caller sets one.
        """
        # The proxy's control port is chosen here, so that the nodes, which take longer, need not wait for the proxy.
        with held_port(LOOPBACK) as self._control_port:
            self._console.say(f"starting {_listed(nodes)}")
            self._proxy = SupervisedServer("proxy", environ, self._console, self._proxy_command(), self._tls)
            for node in nodes:
                server = SupervisedServer(node.name, environ, self._console, self._node_command(node))
                self._nodes[node.name] = (node, server)
            self._found = await self._proxy.process.listening()
        try:
            await self._until_ready()
        finally:
            self._console.end_progress()
        self._console.say(f"all {len(nodes)} nodes are ready")
        for line in await self._sizes(nodes[0]):
            self._console.say(f"  {line}")
        for node in nodes[:_SHOWN_NODES]:
            cores = f"cores {', '.join(map(str, node.cores))}" if len(node.cores) > 1 else f"core {node.cores[0]}"
            self._console.say(f"  {node.name:10} {self._nodes[node.name][1].url}, {cores}")
        if len(nodes) > _SHOWN_NODES:
            self._console.say(f"  and {len(nodes) - _SHOWN_NODES} more")

    async def watch(self, again: Callable[[], None] = lambda: None) -> str:
        """Starts again what dies, calls ``again`` when it serves, and returns why the cluster cannot serve any more.

        A node that has died too often is left out as long as another one answers requests.
        """
        assert self._proxy is not None, "the cluster was never started"
        proxy = asyncio.create_task(self._proxy.keep(self._proxy_command(self._found), again))
        nodes = {
            asyncio.create_task(server.keep(self._node_command(node), again)): node.role
            for node, server in self._nodes.values()
        }
        running = {proxy, *nodes}
        try:
            while True:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        task.result()
                    except ChildDied as error:
                        self._console.say(str(error))
                if proxy.done():
                    return "the proxy has ended"
                if all(role is Role.PREFILL or task.done() for task, role in nodes.items()):
                    return "no node is left that answers requests"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def stop(self, drain_s: float) -> None:
        """Stops the proxy, which gives what is under way ``drain_s`` to finish, and then the nodes.

        If the nodes ended first, the proxy would wait for others to go on with their answers.
        """
        if any(child.alive for child in self._children()):
            self._console.say(_stopping(await self._under_way(), drain_s))
        if self._proxy is not None:
            await self._proxy.process.stop(drain_s + _STOP_MARGIN_S)
        await asyncio.gather(*(server.process.stop(_NODE_GRACE_S) for _, server in self._nodes.values()))

    async def _under_way(self) -> int:
        """Returns how many requests the proxy has that have not ended; 0 if it does not say."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with _session(self._tls, _COUNT_S) as session, session.get(f"{self.url}/metrics") as response:
                if found := _UNDER_WAY.search(await response.text()):
                    return int(float(found[1]))
        return 0

    async def kill(self) -> None:
        """Ends everything now."""
        await asyncio.gather(*(child.end(0.0) for child in self._children()))

    def _proxy_command(self, before: Listening | None = None) -> Sequence[str]:
        return proxy_command(self._http, self._control_port, before)

    def _node_command(self, node: NodePlan) -> Sequence[str]:
        return node_command(node, f"tcp://{LOOPBACK}:{self._control_port}")

    def _children(self) -> list[ServerProcess]:
        proxy = [self._proxy.process] if self._proxy is not None else []
        return [*proxy, *(server.process for _, server in self._nodes.values())]

    async def _until_ready(self) -> None:
        reported = self._console.elapsed_s
        async with _session(self._tls, _LOOK_S) as session:
            while True:
                for child in self._children():
                    if not child.alive:
                        raise child.died()
                missing = self._nodes.keys() - await registered_nodes(session, self.url)
                servers = () if missing else (self.url, *(server.url for _, server in self._nodes.values()))
                if servers and all(await asyncio.gather(*(_is_ready(session, url) for url in servers))):
                    return
                compiling = self._look_at_compiler()
                self._console.progress(self._share(missing, compiling), self._timing(), self._rows(missing, compiling))
                if not self._console.shows_progress and self._console.elapsed_s - reported >= _REPORT_S:
                    reported = self._console.elapsed_s
                    waiting = "; ".join(f"{name} ({stage})" for name, stage in self._rows(missing, compiling))
                    self._console.say(f"waiting for {waiting}; {self._timing()}")
                await self._pause()

    def _look_at_compiler(self) -> Compiling | None:
        """Returns how far the compiler is, and says so when it is first seen at work."""
        compiling = self._compiling()
        if compiling is not None and not self.compiled:
            self.compiled = True
            self._console.say("the CPU kernels are compiled for this machine, which happens at its first start only")
        return compiling

    def _timing(self) -> str:
        elapsed = f"{self._console.elapsed_s:.0f} s"
        if self._expected_s is None or self.compiled:
            return elapsed
        return f"{elapsed}; the last start took {self._expected_s:.0f} s"

    def _rows(self, missing: Set[str], compiling: Compiling | None) -> list[tuple[str, str]]:
        """Returns what each part that is not ready does now."""
        rows = [(name, self._stage(name)) for name in self._nodes if name in missing]
        if compiling is not None:
            rows.append(("CPU kernels", f"{compiling.done} of {compiling.sources} sources compiled"))
        return rows or [("proxy", "not ready yet")]

    def _stage(self, name: str) -> str:
        """Returns what a node does now: what it said last, other lines left out."""
        found = _STAGE.search(self._nodes[name][1].process.last_line)
        if found is not None:
            self._stages[name] = found["stage"] or "joining the cluster"
        return self._stages.get(name, "starting")

    def _share(self, missing: Set[str], compiling: Compiling | None) -> float:
        """Returns how much of the start is over, from 0 to 1: of all nodes' stages, and of what is compiled."""
        parts = [_stages_done(self._stage(name)) if name in missing else 1.0 for name in self._nodes]
        if compiling is not None:
            parts.append(compiling.done / compiling.sources)
        return sum(parts) / len(parts)

    async def _sizes(self, node: NodePlan) -> list[str]:
        """Returns the block about what a node serves and what fits, which is the same for all; none if it is silent."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            url = f"{self._nodes[node.name][1].url}/server_info"
            async with _session(None, _LOOK_S) as session, session.get(url) as response:
                return msgspec.json.decode(await response.read(), type=_ServerInfo).sizes.lines
        return []

    async def _pause(self) -> None:
        """Waits until it is worth looking again: for a moment, or until a process ends."""
        ends = [asyncio.create_task(child.wait()) for child in self._children()]
        try:
            await asyncio.wait(ends, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()


def _session(tls: ssl.SSLContext | None, within_s: float) -> aiohttp.ClientSession:
    """Returns a session with the proxy, each of whose answers has to come ``within_s``."""
    connector = aiohttp.TCPConnector(ssl=tls or True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=within_s), connector=connector)


def _stopping(answers: int, drain_s: float) -> str:
    """Returns what a stopping cluster says of the answers that are under way."""
    if not answers:
        return "stopping"
    some, them = ("1 answer has", "it") if answers == 1 else (f"{answers} answers have", "them")
    return f"stopping: {some} {drain_s:g} s to finish; a second Ctrl-C ends {them} at once"


class _ServerInfo(msgspec.Struct):
    """The part of a node's ``/server_info`` that is shown."""

    sizes: NodeSizes


def _stages_done(now: str) -> float:
    """Returns how many of a node's stages are over in the stage ``now``, as a share of all."""
    reached = [number for number, stage in enumerate(_STAGES, 1) if stage in now]
    return max(reached, default=0) / (len(_STAGES) + 1)


def _listed(nodes: Sequence[NodePlan]) -> str:
    """Returns such words as ``the proxy, 1 prefill node and 2 decode nodes``."""
    counts = Counter(node.role.value for node in nodes)
    parts = ["the proxy", *(f"{count} {role} node{'s' if count > 1 else ''}" for role, count in counts.items())]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


async def registered_nodes(session: aiohttp.ClientSession, url: str) -> set[str]:
    """Returns the names of the nodes that the proxy at ``url`` has now; none while it does not answer."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.get(f"{url}/instances") as response:
            if response.status == 200:
                listing = await response.json()
                return {instance["name"] for instance in listing}
    return set()


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    return False
