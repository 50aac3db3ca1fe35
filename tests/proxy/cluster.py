"""A running proxy with nodes that are registered at it, all in the event loop of one test."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import msgspec
import uvloop
import zmq
import zmq.asyncio

from pdserve.api.node.registration import Registration
from pdserve.config import (
    HttpConfig,
    PrefillAnswers,
    ProxyConfig,
    RegistryConfig,
    RelayConfig,
    RequestConfig,
    RoutingConfig,
    TlsConfig,
)
from pdserve.control.frame import Opener, Purpose, Sealer, Secrets
from pdserve.wire.discovery import (
    Capacity,
    ComputeCores,
    NodeHeartbeat,
    NodeHello,
    NodeInfo,
    NodeLoad,
    ProxyWelcome,
    Register,
    Role,
)
from pdserve.wire.ids import new_id
from pdserve.wire.terms import TICKET_HEADER, Ticket
from pdserve.wire.version import SPOKEN
from pdserve_proxy.server import run
from pdserve_proxy.serving import Addresses
from tests.proxy.fake_node import FakeNode

SECRET = b"a secret for tests"
HEARTBEAT_MS = 50
PATIENCE_S = 10.0

T = TypeVar("T")


def run_async(scenario: Coroutine[object, object, T]) -> T:
    """Runs one scenario on the event loop that the proxy uses in production."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bounded(scenario))


async def _bounded(scenario: Coroutine[object, object, T]) -> T:
    async with asyncio.timeout(30):
        return await scenario


async def eventually(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits for something that no event announces."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = condition()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


def node_info(
    name: str,
    role: Role,
    url: str = "",
    *,
    control: str = "",
    model: str = "m",
    fingerprint: str = "f",
    boot_id: bytes | None = None,
    max_running: int = 4,
    max_model_len: int = 256,
    compute: ComputeCores | None = None,
    answers: str = "",
    formats: str = "",
) -> NodeInfo:
    """Returns a node's description of itself."""
    return NodeInfo(
        name=name,
        boot_id=boot_id or new_id(),
        role=role,
        url=url or f"http://{name}.invalid:1",
        control=control or (f"tcp://{name}.invalid:2" if role is Role.PREFILL else ""),
        model=model,
        fingerprint=fingerprint,
        capacity=Capacity(max_running=max_running, num_blocks=16, block_size=16, max_model_len=max_model_len),
        protocol=SPOKEN.newest,
        oldest_protocol=SPOKEN.oldest,
        compute=compute,
        answers=answers,
        formats=formats,
    )


def proxy_config(
    *,
    http_port: int = 0,
    max_body_bytes: int = 2**20,
    drain_s: float = 2.0,
    timeout_s: float = 20.0,
    idle_timeout_s: float = 10.0,
    resume_wait_s: float = 10.0,
    write_timeout_s: float = 20.0,
    tls: TlsConfig | None = None,
    prefill_answers: PrefillAnswers = PrefillAnswers.OFF,
) -> ProxyConfig:
    """Returns a configuration for tests. Nodes keep to their roles: those of tests name no machine."""
    return ProxyConfig(
        http=HttpConfig(
            port=http_port, max_body_bytes=max_body_bytes, drain_s=drain_s, write_timeout_s=write_timeout_s
        ),
        tls=tls or TlsConfig(),
        registry=RegistryConfig(control_port=0, heartbeat_ms=4 * HEARTBEAT_MS),
        relay=RelayConfig(idle_timeout_s=idle_timeout_s, resume_wait_s=resume_wait_s),
        routing=RoutingConfig(prefill_answers=prefill_answers),
        request=RequestConfig(timeout_s=timeout_s),
    )


@asynccontextmanager
async def registered(
    node: NodeInfo,
    *controls: str,
    secret: bytes | Secrets = SECRET,
    heartbeat_ms: int = HEARTBEAT_MS,
    load: NodeLoad | Callable[[], NodeLoad] = NodeLoad(running=1),  # noqa: B008  # frozen
) -> AsyncIterator[Registration]:
    """Lets ``node`` send heartbeats to the proxies at ``controls``; entered when all of them know it.

    ``load`` is what every heartbeat says, or returns what the next one says.
    """
    registration = Registration(node, controls, secret, heartbeat_ms, load if callable(load) else lambda: load)
    task = asyncio.create_task(registration.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            for event in registration.registered.values():
                await event.wait()
        yield registration
    finally:
        await cancelled(task)


@asynccontextmanager
async def heard(node: NodeInfo, control: str) -> AsyncIterator[asyncio.Event]:
    """Lets ``node`` send heartbeats until the event is set, and then nothing more, as if its host had vanished."""
    silent = asyncio.Event()
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(control)
        sealer = Sealer(SECRET, Purpose.DISCOVERY, node.boot_id)

        async def send() -> None:
            while not silent.is_set():
                await socket.send(sealer.seal(NodeHeartbeat(node.boot_id, NodeLoad()), proxy))
                await asyncio.sleep(HEARTBEAT_MS / 1000)

        opener = Opener(SECRET, Purpose.DISCOVERY, ProxyWelcome, receiver=node.boot_id)
        async with asyncio.timeout(PATIENCE_S):
            await socket.send(sealer.seal(NodeHello(node.boot_id, new_id(), SPOKEN.newest, SPOKEN.oldest)))
            proxy = opener.open_from(await socket.recv()).sender
            await socket.send(sealer.seal(Register(node), proxy))
            await socket.recv()
        task = asyncio.create_task(send())
        try:
            yield silent
        finally:
            await cancelled(task)


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@dataclass
class Cluster:
    """A proxy with its nodes, and a client of it."""

    addresses: Addresses
    http: aiohttp.ClientSession
    stop: asyncio.Event
    stopped: asyncio.Task[None]
    nodes: AsyncExitStack
    registrations: dict[bytes, Registration] = field(default_factory=dict)
    """The registration of each node that was added, by its boot id."""
    before: Mapping[str, float] = field(default_factory=dict)
    """The figures from which this test counts, by their lines."""

    async def add(
        self,
        *nodes: NodeInfo,
        load: NodeLoad | Callable[[], NodeLoad] = NodeLoad(running=1),  # noqa: B008  # frozen
    ) -> None:
        for node in nodes:
            registration = await self.nodes.enter_async_context(registered(node, self.addresses.control, load=load))
            self.registrations[node.boot_id] = registration

    async def ready(self) -> None:
        """Waits until the proxy is ready: it has nodes, and they have said that they have met, with their loads."""

        async def is_ready() -> bool:
            async with self.http.get("/ready") as response:
                return response.status == 200

        await eventually(is_ready, "the nodes say that they have met")

    async def instances(self) -> list[str]:
        """Returns the names of the nodes that the proxy knows."""
        async with self.http.get("/instances") as response:
            return [entry["name"] for entry in await response.json()]

    async def known_to_all(self) -> None:
        """Waits until all workers know the nodes: the kernel chooses who answers, so many answers have to agree."""

        async def ready(http: aiohttp.ClientSession) -> bool:
            async with http.get("/ready") as response:
                return response.status == 200

        async def all_ready() -> bool:
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(self.addresses.url, connector=connector) as http:
                return all(await asyncio.gather(*(ready(http) for _ in range(16))))

        await eventually(all_ready, "every worker knows a node")

    async def dropped(self, name: str) -> None:
        """Waits until the proxy has dropped the node ``name``."""

        async def gone() -> bool:
            return name not in await self.instances()

        await eventually(gone, f"{name} is dropped")

    def chat(self, **fields: object) -> aiohttp.client._RequestContextManager:
        return self.http.post("/v1/chat/completions", json={"model": "m", **fields})

    async def ask(self, **fields: object) -> tuple[int, bytes]:
        """Returns the status and the body of the answer to a chat."""
        async with self.chat(**fields) as response:
            return response.status, await response.read()


@asynccontextmanager
async def cluster(config: ProxyConfig | None = None, secret: bytes = SECRET) -> AsyncIterator[Cluster]:
    """Runs a proxy, with no node yet, and stops it at the exit."""
    stop = asyncio.Event()
    listening: asyncio.Queue[Addresses] = asyncio.Queue()
    task = asyncio.create_task(run(config or proxy_config(), secret, stop, listening.put_nowait))
    async with asyncio.timeout(PATIENCE_S):
        addresses = await listening.get()
    try:
        async with AsyncExitStack() as nodes, aiohttp.ClientSession(addresses.url) as http:
            yield Cluster(addresses, http, stop, task, nodes)
    finally:
        stop.set()
        await task


def ticket_of(node: FakeNode, which: int = 0) -> Ticket:
    header = node.requests[which].headers[TICKET_HEADER]
    frame = base64.urlsafe_b64decode(header + "=" * (-len(header) % 4))
    return Opener(SECRET, Purpose.TICKET, Ticket).open(frame)


def error_of(body: bytes) -> dict[str, object]:
    error = msgspec.json.decode(body, type=dict[str, dict[str, object]])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def figures(at: Cluster) -> dict[str, float]:
    """Returns the proxy's metrics, each by its name and labels."""
    async with at.http.get("/metrics") as response:
        text = await response.text()
    return {line: float(value) for line, value in re.findall(r"^([^#].*) ([0-9.e+]+)$", text, re.MULTILINE)}


async def metric(at: Cluster, line: str) -> float:
    """Returns what a metric has grown by in this test."""
    return (await figures(at)).get(line, 0.0) - at.before.get(line, 0.0)
