"""Several workers behind one port share one registry and one set of metrics, and each dies alone."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import os
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from pdserve.config import AdmissionConfig, ProxyConfig, WorkersConfig
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Deregister, NodeHeartbeat, NodeLoad, Register, Role
from pdserve.wire.proxy_workers import (
    Credentials,
    KnownNode,
    Nodes,
    NodesChanged,
    Renewed,
    Suspected,
    SuspectedRequest,
    ToWorker,
    WorkerHello,
)
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.registry import Registry, RegistryMirror
from pdserve_proxy.registry.snapshot import Reachability
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.server import run
from pdserve_proxy.serving import Addresses
from pdserve_proxy.workers import worker, worker_channel
from pdserve_proxy.workers.supervisor import WorkerDied, supervise, worker_share
from pdserve_proxy.workers.worker_channel import WorkerChannel
from tests.proxy.cluster import SECRET, cancelled, cluster, eventually, node_info, proxy_config, registered
from tests.proxy.fake_node import Exchange, FakeNode

pytestmark = pytest.mark.integration

WORKERS = 2


def workers_config(drain_s: float = 5.0) -> ProxyConfig:
    return dataclasses.replace(proxy_config(drain_s=drain_s), workers=WorkersConfig(WORKERS))


def children() -> set[int]:
    """Returns the worker processes that this process has started."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = set()
    for pid in pids:
        try:
            if b"pdserve_proxy.workers.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@dataclass
class Proxy:
    addresses: Addresses
    stop: asyncio.Event
    stopped: asyncio.Task[None]

    async def ask(self, path: str = "/v1/completions") -> bytes:
        """Sends a request on a connection of its own, so that any worker may get it."""
        async with aiohttp.ClientSession(self.addresses.url) as http:
            if path.startswith("/v1/"):
                async with http.post(path, json={"stream": True}) as response:
                    assert response.status == 200, await response.text()
                    return await response.read()
            async with http.get(path) as response:
                assert response.status == 200, await response.text()
                return await response.read()

    async def known_to_all(self) -> None:
        """Waits until all workers know the nodes: the kernel chooses who answers, so many answers have to agree."""

        async def all_ready() -> bool:
            answers = await asyncio.gather(*(self.ask("/ready") for _ in range(16)), return_exceptions=True)
            return not any(isinstance(answer, BaseException) for answer in answers)

        await eventually(all_ready, "every worker is ready")

    async def metric(self, line: str) -> float:
        found = re.search(rf"^{re.escape(line)} ([0-9.e+]+)$", (await self.ask("/metrics")).decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


@asynccontextmanager
async def proxy(config: ProxyConfig) -> AsyncIterator[Proxy]:
    stop = asyncio.Event()
    listening: asyncio.Queue[Addresses] = asyncio.Queue()
    task = asyncio.create_task(run(config, SECRET, stop, listening.put_nowait))
    try:
        async with asyncio.timeout(20):
            yield Proxy(await listening.get(), stop, task)
    finally:
        stop.set()
        await task


class Node:
    """Streams one event, and the end when it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Semaphore(0), asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"data: 1\n\n")
        self.begun.release()
        await self.go_on.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.finish()


WHOLE = b"data: 1\n\ndata: [DONE]\n\n"
OK = 'pdserve_proxy_outcomes_total{outcome="ok"}'


async def test_a_node_registers_once_and_every_worker_serves_it_and_figures_are_of_all() -> None:
    behaviour = Node()
    behaviour.go_on.set()
    async with FakeNode(behaviour) as node, proxy(workers_config()) as running, AsyncExitStack() as nodes:
        await nodes.enter_async_context(registered(node_info("x", Role.MIXED, node.url), running.addresses.control))
        assert len(children()) == WORKERS
        await running.known_to_all()
        assert await asyncio.gather(*(running.ask() for _ in range(40))) == [WHOLE] * 40
        # This holds for every worker, although each has had only some of the forty requests.
        assert [await running.metric(OK) for _ in range(6)] == [40.0] * 6
        assert await running.metric('pdserve_proxy_nodes{role="mixed"}') == 1
        assert await running.metric("pdserve_proxy_requests_in_flight") == 0
        assert await running.metric('pdserve_proxy_node_requests_total{node="x"}') == 40
        for process in ("supervisor", "worker-0", "worker-1"):
            assert await running.metric(f'process_resident_memory_bytes{{process="{process}"}}') > 0
        assert (await running.ask("/metrics")).count(b"\npdserve_build_info{") == 1
        assert b'"name":"x"' in await running.ask("/instances")
    assert not children()


async def test_every_worker_asks_for_the_keys() -> None:
    config = dataclasses.replace(workers_config(), admission=AdmissionConfig(api_keys=("a-key-of-a-client-0123",)))
    async with proxy(config) as running:

        async def status(headers: dict[str, str]) -> int:
            async with (
                aiohttp.ClientSession(running.addresses.url) as http,
                http.post("/v1/completions", json={}, headers=headers) as response,
            ):
                return response.status

        # Each request has a connection of its own, so that all workers have some.
        assert await asyncio.gather(*(status({}) for _ in range(16))) == [401] * 16
        right = {"authorization": "Bearer a-key-of-a-client-0123"}
        assert await asyncio.gather(*(status(right) for _ in range(16))) == [503] * 16, "let in, and no node there"


async def test_a_worker_that_dies_is_replaced_and_what_it_counted_stays_counted() -> None:
    behaviour = Node()
    behaviour.go_on.set()
    async with (
        FakeNode(behaviour) as node,
        proxy(workers_config()) as running,
        registered(node_info("x", Role.MIXED, node.url), running.addresses.control),
    ):
        await running.known_to_all()
        assert await asyncio.gather(*(running.ask() for _ in range(20))) == [WHOLE] * 20
        assert await running.metric(OK) == 20
        before = children()
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: len(children() - {victim}) == WORKERS, "another worker is started")
        # Some of these may wait in the dead worker's socket until the new one takes them.
        assert await asyncio.gather(*(running.ask() for _ in range(20))) == [WHOLE] * 20
        assert await running.metric(OK) == 40


async def test_a_worker_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy one would have longer."""
    monkeypatch.setattr(worker_channel, "PING_S", 0.1)
    monkeypatch.setattr(worker_channel, "STILL_S", 0.5)
    monkeypatch.setattr(worker_channel, "MAX_UNANSWERED", 6000)

    behaviour = Node()
    behaviour.go_on.set()
    async with (
        FakeNode(behaviour) as node,
        proxy(workers_config()) as running,
        registered(node_info("x", Role.MIXED, node.url), running.addresses.control),
    ):
        await running.known_to_all()
        before = children()
        victim = min(before)
        os.kill(victim, signal.SIGSTOP)
        await eventually(lambda: len(children() - {victim}) == WORKERS, "another worker is started")
        assert await asyncio.gather(*(running.ask() for _ in range(20))) == [WHOLE] * 20
        assert children() > before - {victim}, "the other one is as it was"


async def test_a_supervisor_that_stood_still_itself_kills_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channel, "PING_S", 0.2)
    monkeypatch.setattr(worker_channel, "MAX_UNANSWERED", 3)

    async with proxy(workers_config()) as running:
        before = children()
        for _ in range(3):
            time.sleep(1.0)  # noqa: ASYNC251 (what a stopped process does)
            await asyncio.sleep(0.3)
        assert children() == before
        assert not running.stopped.done()


async def test_a_worker_whose_supervisor_hangs_does_not_live() -> None:
    """It serves on by what it knows, but hears of no node that comes or goes, until somebody restarts the proxy."""
    async with proxy(workers_config()) as running:
        assert status_of(running, "/live") == 200
        until = time.monotonic() + 60
        while status_of(running, "/live") == 200:  # the supervisor runs in this loop, which does not turn
            assert time.monotonic() < until
            time.sleep(0.1)  # noqa: ASYNC251 (what a hung supervisor does)


def status_of(proxy: Proxy, path: str) -> int:
    try:
        with urllib.request.urlopen(proxy.addresses.url + path, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_all_workers_drain_on_stop() -> None:
    behaviour = Node()
    async with (
        FakeNode(behaviour) as node,
        proxy(workers_config()) as running,
        registered(node_info("x", Role.MIXED, node.url), running.addresses.control),
    ):
        await running.known_to_all()
        streams = [asyncio.create_task(running.ask()) for _ in range(12)]
        for _ in streams:
            await behaviour.begun.acquire()
        running.stop.set()
        host, _, port = running.addresses.url.removeprefix("http://").partition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                break
            writer.close()
            await asyncio.sleep(0.01)
        assert not running.stopped.done()
        behaviour.go_on.set()
        assert await asyncio.gather(*streams) == [WHOLE] * 12
        await running.stopped
    assert not children()


async def test_workers_die_with_their_supervisor() -> None:
    program = f"""
import sys
from pdserve_proxy.server import serve
from tests.proxy.test_workers import workers_config
sys.exit(serve(workers_config(), {SECRET!r}))
"""

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            while b"pdserve proxy listening" not in (line := await process.stderr.readline()):
                assert line
        process.kill()
        async with asyncio.timeout(10):
            # Every process that holds the pipe has to be gone for it to end.
            while await process.stderr.read(4096):
                pass
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("command", [["false"], [sys.executable, "-c", "import sys; sys.stdin.buffer.read()"]])
async def test_workers_that_do_not_come_up_end_the_proxy(command: list[str]) -> None:
    with pytest.raises(WorkerDied, match="did not come up"):
        await supervise(workers_config(), Credentials(SECRET, ()), asyncio.Event(), lambda _: None, command)


async def test_workers_that_cannot_be_started_end_the_proxy(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"worker 0 of the proxy cannot be started: .*No such file"):
        await supervise(
            workers_config(), Credentials(SECRET, ()), asyncio.Event(), lambda _: None, [str(tmp_path / "none")]
        )


async def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no folder for the workers' socket can be made: .*No such file"):
        await supervise(workers_config(), Credentials(SECRET, ()), asyncio.Event(), lambda _: None)


async def test_a_socket_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    registry, metrics = Registry(1.0, 3), ProxyMetrics("supervisor")
    with pytest.raises(ConfigError, match="the workers' socket cannot be made: "):
        WorkerChannel(f"ipc://{tmp_path}/gone/workers", registry, metrics)


async def test_a_worker_that_hears_nothing_says_what_it_has_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SUPERVISOR_TIMEOUT_S", 0.1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent, socket.socket() as listener:
        address = f"ipc://{tmp_path}/workers"
        silent.bind(address)
        launch = worker.WorkerLaunch(
            workers_config(), Credentials(SECRET, ()), b"0.1", address, listener=os.dup(listener.fileno())
        )
        with pytest.raises(worker.SupervisorSilent, match="its supervisor has not told it the nodes"):
            await worker.work(launch, asyncio.Event())


async def test_a_port_that_another_proxy_has_is_not_shared_with_it() -> None:
    async with cluster() as other:
        port = int(other.addresses.url.rpartition(":")[2])
        config = dataclasses.replace(proxy_config(http_port=port), workers=WorkersConfig(WORKERS))
        with pytest.raises(ConfigError, match=str(port)):
            await run(config, SECRET, asyncio.Event())


def test_each_worker_has_its_share_of_the_limits() -> None:
    config = dataclasses.replace(
        workers_config(),
        workers=WorkersConfig(4),
        admission=AdmissionConfig(max_in_flight=10, max_in_flight_per_key=0, max_queued=1),
    )
    share = worker_share(config).admission
    assert (share.max_in_flight, share.max_in_flight_per_key, share.max_queued) == (3, 0, 1)


def test_a_mirror_forgets_that_a_node_was_unreachable_at_its_next_heartbeat_only() -> None:
    attempts = Attempts()
    registry, mirror = Registry(1.0, 3), RegistryMirror(attempts)
    info = node_info("x", Role.MIXED)

    def copy() -> Reachability:
        entries = tuple(
            KnownNode(node.info, node.load, node.seen_s, node.info.boot_id in registry.draining, node.proxies)
            for node in registry.snapshot().nodes
        )
        mirror.take(Nodes(entries, tuple(registry.prefilled), registry.lost))
        return mirror.snapshot().nodes[0].state

    registry.handle(Register(info), 1.0)
    assert copy() is Reachability.SERVING
    attempt = attempts.begin((info, 1))
    mirror.mark_unreachable(info.boot_id)
    assert not mirror.snapshot().pairings
    registry.handle(Register(node_info("y", Role.MIXED)), 1.5)
    assert copy() is Reachability.UNREACHABLE
    registry.handle(NodeHeartbeat(info.boot_id, NodeLoad(running=1)), 2.0)
    assert copy() is Reachability.SERVING
    registry.handle(NodeHeartbeat(info.boot_id, NodeLoad(running=1), draining=True), 2.1)
    assert copy() is Reachability.DRAINING
    assert mirror.draining == {info.boot_id}
    registry.handle(NodeHeartbeat(info.boot_id, NodeLoad(running=1), proxies=(b"a" * 16, b"b" * 16)), 2.2)
    copy()
    assert mirror.snapshot().live_proxies == 2
    assert attempts.load(info.boot_id) == 1
    attempt.end_everywhere()
    assert attempts.load(info.boot_id) == 0
    registry.expire(100.0)
    mirror.take(Nodes((), (), registry.lost))
    assert not mirror.snapshot().nodes
    assert not attempts._reported


def test_a_mirror_tells_which_of_the_nodes_that_are_gone_fell_silent() -> None:
    registry, mirror = Registry(1.0, 3), RegistryMirror(Attempts())
    told: list[str] = []
    mirror.on_loss(lambda info: told.append(info.name))
    left, lost, stays = (node_info(name, Role.MIXED) for name in ("left", "lost", "stays"))

    def copy() -> None:
        entries = tuple(KnownNode(node.info, node.load, node.seen_s) for node in registry.snapshot().nodes)
        mirror.take(Nodes(entries, (), registry.lost))

    for info in (left, lost, stays):
        registry.handle(Register(info), 1.0)
    copy()
    registry.handle(Deregister(left.boot_id), 2.0)
    registry.handle(NodeHeartbeat(stays.boot_id, NodeLoad()), 3.0)
    registry.expire(4.0)
    copy()
    assert told == ["lost"]
    registry.handle(Register(lost), 5.0)
    copy()
    registry.handle(Deregister(lost.boot_id), 5.0)
    copy()
    assert told == ["lost"]


decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class ChannelWorker:
    """A worker's end of the channel, which answers nothing."""

    def __init__(self, context: zmq.asyncio.Context, address: str, name: bytes = b"0.1") -> None:
        self.mirror = RegistryMirror(Attempts())
        self.all_nodes = 0
        """How many messages brought all nodes."""
        self.secrets: list[bytes] = []
        """The secrets of the credentials that came."""
        self.suspects: set[str] = set()
        """The ids of the suspected requests that came."""
        self.sent = 0
        """How many nodes the messages with changes held."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, name)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    async def greet(self) -> None:
        await self._socket.send(msgspec.msgpack.encode(WorkerHello(importlib.metadata.version("pdserve"))))

    async def find(self, suspect: SuspectedRequest) -> None:
        await self._socket.send(msgspec.msgpack.encode(Suspected((suspect,))))

    async def take(self) -> None:
        match decoder.decode(await self._socket.recv()):
            case Nodes() as nodes:
                self.all_nodes += 1
                self.mirror.take(nodes)
            case Renewed(credentials=credentials):
                self.secrets.append(credentials.secret)
            case Suspected(requests=requests):
                self.suspects |= {request.request_id for request in requests}
            case NodesChanged() as changes:
                assert changes.nodes or changes.gone
                self.sent += len(changes.nodes)
                self.mirror.take_changes(changes)

    def names(self) -> list[str]:
        return [node.info.name for node in self.mirror.snapshot().nodes]

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def serving(hub: WorkerChannel) -> AsyncIterator[None]:
    """Has the channel serve, and ends that however the block ends, so that no later test meets what is left."""
    task = asyncio.create_task(hub.run())
    try:
        yield
    finally:
        await cancelled(task)


async def test_a_worker_gets_what_has_changed_and_not_all_nodes_each_time(tmp_path: Path) -> None:
    address, registry = f"ipc://{tmp_path}/channel", Registry(1.0, missed_heartbeats=3)
    infos = [node_info(f"n{number}", Role.MIXED) for number in range(50)]
    for info in infos:
        registry.handle(Register(info), 0.0)
    told: list[str] = []
    with (
        WorkerChannel(address, registry, ProxyMetrics()) as hub,
        zmq.asyncio.Context() as context,
        closing(ChannelWorker(context, address)) as worker,
    ):
        hub.expect(b"0.1")
        worker.mirror.on_loss(lambda info: told.append(info.name))
        await worker.greet()
        async with serving(hub), asyncio.timeout(10.0):
            while worker.names() != [info.name for info in infos]:
                await worker.take()
            before = worker.sent
            registry.handle(NodeHeartbeat(infos[3].boot_id, NodeLoad(running=7)), 1.0)
            while worker.mirror.load(infos[3].boot_id) != NodeLoad(running=7):
                await worker.take()
            assert worker.sent - before <= 2
            registry.handle(Deregister(infos[4].boot_id), 2.0)
            registry.handle(NodeHeartbeat(infos[5].boot_id, NodeLoad(), draining=True), 3.0)
            registry.expire(3.5)
            while len(worker.names()) > 2:
                await worker.take()
        assert worker.names() == ["n3", "n5"]
        assert worker.mirror.draining == {infos[5].boot_id}
        assert sorted(told) == sorted({info.name for info in infos} - {"n3", "n4", "n5"})
        assert worker.all_nodes == 1


async def test_a_worker_that_missed_changes_gets_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channel, "PUBLISH_PAUSE_S", 0.001)
    monkeypatch.setattr(worker_channel, "MAX_QUEUED", 1)
    monkeypatch.setattr(worker_channel, "RETRY_S", 0.01)
    address, registry = f"ipc://{tmp_path}/channel", Registry(1.0, missed_heartbeats=3)
    info, late = node_info("n", Role.MIXED), node_info("late", Role.MIXED)
    registry.handle(Register(info), 0.0)
    with (
        WorkerChannel(address, registry, ProxyMetrics()) as hub,
        zmq.asyncio.Context() as context,
        closing(ChannelWorker(context, address)) as worker,
        closing(ChannelWorker(context, address, b"1.1")) as finder,
    ):
        hub.expect(b"0.1")
        hub.expect(b"1.1")
        await worker.greet()
        async with serving(hub), asyncio.timeout(20.0):
            while not worker.all_nodes:
                await worker.take()
            while not hub._behind:  # it does not read, and its queues have an end
                registry.handle(NodeHeartbeat(info.boot_id, NodeLoad(running=1)), 1.0)
                await asyncio.sleep(0)
            registry.handle(Register(late), 2.0)
            hub.renew(Credentials(b"a secret that is new", ()))
            found = 0
            while b"0.1" not in hub._unaware:
                found += 1
                name = f"r{found}"
                await finder.find(SuspectedRequest(name.encode(), 1, name, b"", "", time.monotonic() + 60.0))
                await asyncio.sleep(0)

            def missed() -> bool:
                """Whether the worker lacks the last suspect, or one of those that the supervisor keeps.

                The queues may have room for more than it keeps, and then the oldest ones are gone for good.
                """
                kept = {request.request_id for request in hub._suspects.refused()}
                return f"r{found}" not in worker.suspects or not kept <= worker.suspects

            while worker.names() != ["n", "late"] or not worker.secrets or missed():
                await worker.take()
        assert worker.all_nodes > 1
        assert worker.secrets == [b"a secret that is new"]
        assert found, "a suspect for which there was no room"


async def test_a_worker_without_room_is_tried_seldom_and_gets_credentials_before_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_channel, "PUBLISH_PAUSE_S", 0.001)
    monkeypatch.setattr(worker_channel, "RETRY_S", 3600.0)
    address, registry = f"ipc://{tmp_path}/channel", Registry(1.0, missed_heartbeats=3)
    info, name = node_info("n", Role.MIXED), b"0.1"
    registry.handle(Register(info), 0.0)
    room, refused = True, 0
    send = WorkerChannel._send_encoded

    async def send_if_room(hub: WorkerChannel, to: bytes, data: bytes) -> bool:
        nonlocal refused
        refused += not room
        return room and await send(hub, to, data)

    monkeypatch.setattr(WorkerChannel, "_send_encoded", send_if_room)
    with WorkerChannel(address, registry, ProxyMetrics()) as hub, zmq.asyncio.Context() as context:
        hub.expect(name)
        with closing(ChannelWorker(context, address, name)) as worker:
            await worker.greet()
            async with serving(hub), asyncio.timeout(20.0):
                while not worker.all_nodes:
                    await worker.take()
                room = False
                hub.renew(Credentials(b"a secret that is new", ()))
                await eventually(lambda: name in hub._behind, "the worker is behind")
                for number in range(20):
                    registry.handle(NodeHeartbeat(info.boot_id, NodeLoad(running=number)), 1.0)
                    await eventually(lambda: not hub._touched, "the channel has seen the change")
                assert refused == 1
                room, hub._behind[name] = True, 0.0
                registry.handle(NodeHeartbeat(info.boot_id, NodeLoad(running=77)), 2.0)
                while worker.all_nodes < 2:
                    await worker.take()
            assert worker.secrets == [b"a secret that is new"]
            assert worker.mirror.load(info.boot_id) == NodeLoad(running=77)


async def test_a_worker_hears_that_all_nodes_were_lost_however_many_they_were(tmp_path: Path) -> None:
    address, registry = f"ipc://{tmp_path}/channel", Registry(1.0, missed_heartbeats=3)
    count = 1100
    for number in range(count):
        registry.handle(Register(node_info(f"n{number}", Role.MIXED)), 0.0)
    told: list[str] = []
    with WorkerChannel(address, registry, ProxyMetrics()) as hub, zmq.asyncio.Context() as context:
        hub.expect(b"0.1")
        serving = asyncio.create_task(hub.run())
        worker = ChannelWorker(context, address)
        worker.mirror.on_loss(lambda info: told.append(info.name))
        await worker.greet()
        async with asyncio.timeout(20.0):
            while len(worker.names()) < count:
                await worker.take()
            registry.expire(10.0)
            while worker.names():
                await worker.take()
        assert len(told) == count
        worker.close()
        await cancelled(serving)


@pytest.mark.parametrize("version", [importlib.metadata.version("pdserve"), "9.9.9"])
async def test_a_worker_of_another_version_is_named(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/channel"
    registry = Registry(1.0, missed_heartbeats=3)
    with WorkerChannel(address, registry, ProxyMetrics()) as serving_hub, zmq.asyncio.Context() as context:
        serving_hub.expect(b"0.1")
        serving = asyncio.create_task(serving_hub.run())
        with context.socket(zmq.DEALER) as worker:
            worker.set(zmq.IDENTITY, b"0.1")
            worker.set(zmq.LINGER, 0)
            worker.connect(address)
            await worker.send(msgspec.msgpack.encode(WorkerHello(version)))
            await worker.recv()
        await cancelled(serving)
    assert ("restart the proxy" in caplog.text) is (version == "9.9.9")
