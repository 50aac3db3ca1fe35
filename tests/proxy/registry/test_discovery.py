"""Nodes and proxies over real ZMQ sockets: the node's ``Registration`` against the proxy's ``DiscoveryServer``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import pytest
import zmq
import zmq.asyncio

from pdserve.api.node.proxy_link import RegistrationStatus
from pdserve.api.node.registration import Registration
from pdserve.control.frame import Opener, Purpose, Sealer
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Ack, Deregister, NodeHeartbeat, NodeLoad, Register, Role
from pdserve.wire.ids import new_id
from pdserve.wire.status import IncidentKind
from pdserve.wire.terms import PrefillTarget
from pdserve_proxy.metrics import ProxyMetrics, render_families
from pdserve_proxy.recent import Incidents
from pdserve_proxy.registry.discovery_server import MAX_MESSAGE_BYTES, DiscoveryServer
from pdserve_proxy.registry.registry import MAX_NODES, Registry
from tests.endless_message import is_cut, many_parts, sends_without_end
from tests.proxy.cluster import HEARTBEAT_MS, SECRET, cancelled, eventually, node_info, registered

NODE = node_info("d0", Role.DECODE)


class Ear:
    """The discovery server of a proxy, with its registry."""

    def __init__(self, port: int, clock: Callable[[], float], heartbeat_s: float, host: str = "127.0.0.1") -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: list[bytes] = []
        self.boot_id = new_id()
        self.registry = Registry(heartbeat_s, missed_heartbeats=3, watcher=self, own_id=self.boot_id)
        self.metrics = ProxyMetrics()
        self.incidents = Incidents(clock)
        self.discovery = DiscoveryServer(
            self.registry,
            SECRET,
            self.boot_id,
            self.metrics.count_dropped_frame,
            host=host,
            port=port,
            clock=clock,
            incidents=self.incidents,
            clocks=self.metrics.clocks,
        )
        self.control = self.discovery.endpoint
        self.port = int(self.control.rpartition(":")[2])

    def names(self) -> list[str]:
        return [node.info.name for node in self.registry.snapshot().nodes]

    def counts_of_proxies(self) -> list[str]:
        """Returns what those who watch the cluster are told of the number of proxies."""
        return [each.text for each in self.incidents.newest() if each.kind is IncidentKind.PROXIES_CHANGED]

    def live(self) -> int:
        return self.registry.snapshot().live_proxies

    def heard_from(self, boot_id: bytes, load: NodeLoad) -> None:
        pass

    def forget(self, boot_id: bytes) -> None:
        self.lost.append(boot_id)

    def dropped(self, reason: str) -> float:
        name = "pdserve_proxy_discovery_frames_dropped_total"
        return self.metrics.registry.get_sample_value(name, {"reason": reason}) or 0.0


@asynccontextmanager
async def listening(
    port: int = 0,
    clock: Callable[[], float] = time.monotonic,
    heartbeat_s: float = HEARTBEAT_MS / 1000 * 4,
    host: str = "127.0.0.1",
) -> AsyncIterator[Ear]:
    ear = Ear(port, clock, heartbeat_s, host)
    with ear.discovery:
        task = asyncio.create_task(ear.discovery.run())
        try:
            yield ear
        finally:
            await cancelled(task)


@asynccontextmanager
async def raw_peer(control: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A peer that sends any bytes."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(control)
        yield socket


@contextmanager
def sending_from_a_thread(control: str, every_s: float, frames: Iterator[bytes]) -> Iterator[None]:
    """A peer in a thread, which a busy event loop of this process cannot delay."""
    ended = threading.Event()

    def send() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(control)
            while not ended.wait(every_s):
                socket.send(next(frames))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def heartbeats(ear: Ear) -> Iterator[bytes]:
    sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
    yield sealer.seal(Register(NODE), ear.boot_id)
    while True:
        yield sealer.seal(NodeHeartbeat(NODE.boot_id, NodeLoad()), ear.boot_id)


async def test_a_node_registers_sends_heartbeats_and_says_goodbye(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve_proxy.registry.discovery_server")
    async with listening() as ear:
        async with registered(NODE, ear.control):
            assert ear.names() == ["d0"]
            await eventually(lambda: ear.registry.snapshot().nodes[0].load == NodeLoad(running=1), "a heartbeat")
            first = ear.registry.snapshot().nodes[0].seen_s
            await eventually(lambda: ear.registry.snapshot().nodes[0].seen_s > first, "another heartbeat")
        await eventually(lambda: ear.names() == [], "the node is deregistered")
    assert f"node d0 ({NODE.url}) deregistered" in caplog.messages


async def test_goodbye_does_not_wait_for_the_lease() -> None:
    async with listening(clock=lambda: 0.0) as ear:
        async with registered(NODE, ear.control):
            pass
        await eventually(lambda: ear.names() == [], "the node is deregistered while the clock stands")


async def test_a_node_that_falls_silent_is_dropped() -> None:
    async with listening(heartbeat_s=0.1) as ear, raw_peer(ear.control) as peer:
        sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
        await peer.send(sealer.seal(Register(NODE), ear.boot_id))
        await eventually(lambda: ear.names() == ["d0"], "the registration")
        seen_s = ear.registry.snapshot().nodes[0].seen_s
        await eventually(lambda: ear.names() == [], "the expiry")
        assert time.monotonic() - seen_s >= 0.3


async def test_heartbeats_that_wait_while_the_proxy_is_busy_keep_their_node() -> None:
    """Blocks the event loop for longer than a lease, again and again, while the node keeps sending."""

    async with listening(heartbeat_s=0.05) as ear:
        with sending_from_a_thread(ear.control, 0.01, heartbeats(ear)):
            await eventually(lambda: ear.names() == ["d0"], "the registration")
            for _ in range(8):
                time.sleep(0.2)  # noqa: ASYNC251 (what a busy loop does)
                await asyncio.sleep(0)
            assert ear.lost == []


async def test_heartbeats_are_taken_though_the_poll_ended_before_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy loop several turns lie between the end of a poll and the line after it."""

    async def too_early(socket: zmq.asyncio.Socket, timeout_ms: int | None = None) -> int:
        await asyncio.sleep((timeout_ms or 10) / 1000)
        return 0

    monkeypatch.setattr(zmq.asyncio.Socket, "poll", too_early)
    async with listening(heartbeat_s=0.05) as ear:
        with sending_from_a_thread(ear.control, 0.01, heartbeats(ear)):
            await eventually(lambda: ear.names() == ["d0"], "the registration")
            first = ear.registry.snapshot().nodes[0].seen_s
            await eventually(lambda: ear.registry.snapshot().nodes[0].seen_s > first + 0.5, "several leases")
            assert ear.lost == []
        await eventually(lambda: ear.names() == [], "the expiry")


@contextmanager
def listening_in_a_thread(heartbeat_s: float) -> Iterator[Ear]:
    """A discovery server in a thread, which a busy event loop of the test cannot delay."""
    made: Future[tuple[Ear, asyncio.Event]] = Future()

    async def serve() -> None:
        async with listening(heartbeat_s=heartbeat_s) as ear:
            ended = asyncio.Event()
            made.set_result((ear, ended))
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ear, ended = made.result(timeout=10)
    try:
        yield ear
    finally:
        ear.loop.call_soon_threadsafe(ended.set)
        thread.join()


async def test_a_node_whose_event_loop_is_busy_goes_on_sending_heartbeats() -> None:
    """Each turn of the event loop takes longer than a lease, as when thousands of requests come at once."""

    with listening_in_a_thread(heartbeat_s=0.1) as ear:
        async with registered(NODE, ear.control):
            for _ in range(3):
                time.sleep(0.6)  # noqa: ASYNC251 (what a busy loop does)
                await asyncio.sleep(0)
            assert ear.lost == []
        await eventually(lambda: ear.lost == [NODE.boot_id], "the node is deregistered")


async def test_a_node_whose_event_loop_hangs_falls_silent_and_comes_back_with_it() -> None:
    with listening_in_a_thread(heartbeat_s=0.05) as ear:
        registration = Registration(NODE, (ear.control,), SECRET, 20, NodeLoad, stuck_s=0.1)
        node = asyncio.create_task(registration.run())
        await registration.registered[ear.control].wait()
        until = time.monotonic() + 10
        while ear.names() and time.monotonic() < until:
            time.sleep(0.01)  # noqa: ASYNC251 (what a loop that hangs does)
        assert ear.lost == [NODE.boot_id]
        await eventually(lambda: ear.names() == ["d0"], "its new registration")
        await cancelled(node)


async def test_a_node_whose_event_loop_is_blocked_falls_silent_sooner_than_a_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log that nobody reads, or a disk that hangs, blocks it within one call."""
    monkeypatch.setattr("pdserve.api.node.registration.STILL_S", 0.5)
    with listening_in_a_thread(heartbeat_s=0.05) as ear:
        node = asyncio.create_task(Registration(NODE, (ear.control,), SECRET, 20, NodeLoad).run())
        await eventually(lambda: ear.names() == ["d0"], "its registration")
        threading.Event().wait(3.0)
        assert ear.lost == [NODE.boot_id]
        await eventually(lambda: ear.names() == ["d0"], "its new registration")
        await cancelled(node)


async def test_a_proxy_that_stood_still_gives_nodes_time_to_be_heard() -> None:
    """Its clock jumps, as after a suspended virtual machine, and no heartbeat is there yet."""

    class Clock:
        now = 0.0
        looks = 0

        def __call__(self) -> float:
            self.looks += 1
            return self.now

    clock = Clock()
    async with listening(clock=clock, heartbeat_s=0.05) as ear, raw_peer(ear.control) as peer:
        await peer.send(Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id).seal(Register(NODE), ear.boot_id))
        await eventually(lambda: ear.names() == ["d0"], "the registration")
        clock.now = 100.0
        looks = clock.looks
        await eventually(lambda: clock.looks > looks + 8, "several looks at the clock")
        assert ear.lost == []
        while ear.names():
            clock.now += 0.001
            await asyncio.sleep(0.001)
        assert clock.now > 100.1


async def test_a_clock_that_differs_shows_while_its_node_is_still_heard() -> None:
    async with listening() as ear, raw_peer(ear.control) as peer:
        sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id, clock=lambda: time.time() - 45)
        await peer.send(sealer.seal(Register(NODE), ear.boot_id))
        await eventually(lambda: ear.names() == ["d0"], "the registration")
        text = await render_families(ear.metrics.export_families(ear.registry.snapshot()))
        (shown,) = (line for line in text.decode().splitlines() if line.startswith("pdserve_proxy_clock_skew_seconds "))
        assert 45 <= float(shown.split()[1]) < 55


async def test_a_flood_of_frames_does_not_keep_a_dead_node() -> None:
    async with listening(heartbeat_s=0.05) as ear, raw_peer(ear.control) as peer:
        await peer.send(Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id).seal(Register(NODE), ear.boot_id))
        await eventually(lambda: ear.names() == ["d0"], "the registration")
        with sending_from_a_thread(ear.control, 0.0, itertools.repeat(b"x")):
            await eventually(lambda: ear.names() == [], "the expiry")


async def test_a_drain_is_told_at_once() -> None:
    """The interval is a minute: only the drain can have made the node speak up."""
    async with listening(heartbeat_s=60.0) as ear, registered(NODE, ear.control) as registration:
        registration.drain()
        await eventually(lambda: ear.registry.draining == {NODE.boot_id}, "the drain")
        assert ear.names() == ["d0"]


class Meetings:
    """The engine of a node that is told whom to meet."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs = hangs
        self.met: list[list[str]] = []

    def __call__(self, nodes: Sequence[PrefillTarget], met: Callable[[], None]) -> None:
        self.met.append([node.name for node in nodes])
        if not self.hangs:
            met()


async def test_nodes_are_told_at_once_whom_to_meet_and_one_that_hangs_keeps_none_waiting() -> None:
    """The interval is a minute: only what is told at once can be heard in time."""
    names = {"d0": Role.DECODE, "p0": Role.PREFILL, "p1": Role.PREFILL}
    engines = {"d0": Meetings(hangs=True), "p0": Meetings(), "p1": Meetings()}
    async with listening(heartbeat_s=60.0) as ear, AsyncExitStack() as stack:

        async def join(name: str) -> tuple[Registration, asyncio.Task[None]]:
            info = node_info(name, names[name], control=f"tcp://{name}.invalid:2")
            made = Registration(info, (ear.control,), SECRET, 60_000, NodeLoad, meet=engines[name], meet_s=0.5)
            task = asyncio.create_task(made.run())
            stack.push_async_callback(cancelled, task)
            await made.registered[ear.control].wait()
            return made, task

        decode, _ = await join("d0")
        assert not decode.connecting and not ear.registry.snapshot().pairings
        first, gone = await join("p0")
        assert not first.connecting and not decode.connecting, "a node that was ready stays so"
        await eventually(lambda: engines["d0"].met == [["p0"]], "the first to be met")
        assert engines["p0"].met == [["d0"]] and not ear.registry.snapshot().ready_models
        await eventually(
            lambda: ear.registry.snapshot().ready_models == ["m"], "the end of the wait for an engine that hangs"
        )
        await join("p1")
        await cancelled(gone)
        await eventually(lambda: ear.names() == ["d0", "p1"], "the node has gone")
        late = Meetings(hangs=True)
        engines["d0"], names["d0"] = late, Role.DECODE
        again, _ = await join("d0")  # at the same URL
        assert again.connecting and late.met == [["p1"]], "it joins a cluster that has prefill nodes"
        await eventually(lambda: not again.connecting, "its wait is bounded, too")


async def test_a_node_that_a_proxy_takes_back_connects_again_to_those_that_it_had_met() -> None:
    """Nobody else has changed, but the node may have been cut off from all of them, too."""
    engine, decode = Meetings(), node_info("d0", Role.DECODE)
    async with listening() as ear, registered(node_info("p0", Role.PREFILL), ear.control):
        registration = Registration(decode, (ear.control,), SECRET, HEARTBEAT_MS, NodeLoad, meet=engine)
        node = asyncio.create_task(registration.run())
        await eventually(lambda: engine.met == [["p0"]], "the first connection")
        ear.registry.handle(Deregister(decode.boot_id), now=0.0)
        await eventually(lambda: ear.names() == ["p0", "d0"], "the new registration")
        await eventually(lambda: engine.met == [["p0"], ["p0"]], "the new connection")
        await cancelled(node)


async def test_a_restarted_proxy_learns_its_nodes_again() -> None:
    async with listening() as first:
        port = first.port
        registration = Registration(NODE, (first.control,), SECRET, HEARTBEAT_MS, NodeLoad)
        node = asyncio.create_task(registration.run())
        await eventually(lambda: first.names() == ["d0"], "the first registration")
    state = registration.registered[first.control]
    await eventually(lambda: not state.is_set(), "the node noticing that the proxy is down")
    async with listening(port) as second:
        await eventually(lambda: second.names() == ["d0"], "the second registration")
        await eventually(state.is_set, "the node knowing so")
        await cancelled(node)
        assert not state.is_set()


async def test_a_dropped_node_that_lives_is_told_and_comes_back() -> None:
    async with listening() as ear, registered(NODE, ear.control):
        ear.registry.handle(Deregister(NODE.boot_id), now=0.0)
        assert ear.names() == []
        await eventually(lambda: ear.names() == ["d0"], "the new registration")


async def test_a_node_that_starts_before_its_proxy_registers_once_it_is_there() -> None:
    async with listening() as ear:
        port = ear.port
    registration = Registration(NODE, (f"tcp://127.0.0.1:{port}",), SECRET, 60_000, NodeLoad)
    node = asyncio.create_task(registration.run())
    await asyncio.sleep(0)
    async with listening(port) as ear:
        # Its interval is a minute: only the connection itself can have made it speak up.
        await eventually(lambda: ear.names() == ["d0"], "the registration")
        await cancelled(node)


async def test_one_node_at_two_proxies_of_which_one_dies() -> None:
    async with listening() as stays:
        async with listening() as dies:
            registration = Registration(NODE, (stays.control, dies.control), SECRET, HEARTBEAT_MS, NodeLoad)
            node = asyncio.create_task(registration.run())
            await eventually(lambda: stays.names() == dies.names() == ["d0"], "both registrations")
            await eventually(lambda: all(e.is_set() for e in registration.registered.values()), "both acks")
            await eventually(lambda: stays.counts_of_proxies() == ["2 now, 1 before"], "the other proxy is seen")
        await eventually(lambda: not registration.registered[dies.control].is_set(), "the loss of one")
        assert registration.registered[stays.control].is_set()
        assert stays.names() == ["d0"]
        await eventually(lambda: stays.counts_of_proxies()[1:] == ["1 now, 2 before"], "its loss is seen")
        await cancelled(node)


async def test_a_node_follows_the_addresses_of_a_name() -> None:
    known = ["127.0.0.1", "127.0.0.2"]
    async with listening() as first, listening(first.port, host="127.0.0.2") as second:
        name = f"tcp://proxies.example:{first.port}"
        registration = Registration(
            NODE, (name,), SECRET, HEARTBEAT_MS, NodeLoad, resolve_s=0.01, look_up=lambda _: tuple(known)
        )
        unaccepted = registration.unaccepted
        assert unaccepted == "no proxy has accepted this node: no address of one is known yet"
        node = asyncio.create_task(registration.run())
        await eventually(lambda: first.names() == second.names() == ["d0"], "both registrations")
        await eventually(lambda: first.live() == second.live() == 2, "both proxies knowing of each other")
        assert registration.unaccepted is None
        async with listening(first.port, host="127.0.0.3") as third:
            known[:] = ["127.0.0.2", "127.0.0.3"]
            await eventually(lambda: third.names() == ["d0"], "the registration at the new address")
            await eventually(lambda: first.live() == second.live() == third.live() == 3, "three proxies")
            assert first.names() == ["d0"], "a proxy that answers is not left for a change of its name"
        await eventually(lambda: second.live() == 2, "the loss of the third")
        assert set(registration.registered) == {ear.control for ear in (first, second, third)}
        known[:] = ["127.0.0.2"]
        await eventually(lambda: third.control not in registration.registered, "the third being forgotten")
        assert first.control in registration.registered
        await cancelled(node)
        assert not registration.registered


async def test_a_proxy_whose_name_is_gone_is_forgotten_when_it_answers_no_more() -> None:
    known = ["127.0.0.1"]
    async with listening() as ear:
        name = f"tcp://proxies.example:{ear.port}"
        registration = Registration(
            NODE, (name,), SECRET, HEARTBEAT_MS, NodeLoad, resolve_s=0.01, look_up=lambda _: tuple(known)
        )
        node = asyncio.create_task(registration.run())
        await eventually(lambda: ear.names() == ["d0"], "the registration")
        known.clear()
    await eventually(lambda: not registration.registered, "the proxy being forgotten")
    assert registration.unaccepted == "no proxy has accepted this node: no address of one is known yet"
    await cancelled(node)


async def test_another_secret_is_ignored_and_counted() -> None:
    async with listening() as ear:
        registration = Registration(NODE, (ear.control,), b"another secret", HEARTBEAT_MS, NodeLoad)
        node = asyncio.create_task(registration.run())
        await eventually(lambda: ear.dropped("authentication") >= 2, "two refused frames")
        assert ear.names() == []
        assert not registration.registered[ear.control].is_set()
        await cancelled(node)


async def test_bad_frames_are_dropped_and_the_good_one_behind_them_is_taken() -> None:
    async with listening() as ear, raw_peer(ear.control) as peer:
        sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
        foreign = Sealer(SECRET, Purpose.TICKET, NODE.boot_id)
        frame = sealer.seal(Register(NODE), ear.boot_id)
        await peer.send(b"")
        await peer.send(b"not a frame")
        await peer.send_multipart([b"too", b"many", b"parts"])
        await peer.send(foreign.seal(Register(NODE), ear.boot_id))
        await peer.send(sealer.seal(Ack(NODE.boot_id, True), ear.boot_id))
        await eventually(lambda: ear.dropped("malformed") == 4, "four malformed frames")
        assert ear.dropped("authentication") == 1
        assert ear.names() == []
        await peer.send(sealer.seal(Register(NODE), ear.boot_id))
        await eventually(lambda: ear.names() == ["d0"], "the registration")
        await peer.send(frame)
        await eventually(lambda: ear.dropped("authentication") == 2, "the replay being refused")


async def test_ten_thousand_registrations_are_bounded_in_number_and_in_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="pdserve_proxy.registry.discovery_server"):
        async with listening(heartbeat_s=60.0) as ear, raw_peer(ear.control) as peer, raw_peer(ear.control) as first:
            sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
            opener = Opener(SECRET, Purpose.DISCOVERY, Ack, receiver=NODE.boot_id)
            await first.send(sealer.seal(Register(NODE), ear.boot_id))
            assert opener.open(await first.recv()).known
            # In portions for whose answers a proxy has room, however late ZMQ's own thread takes them.
            for _ in range(160):
                for _ in range(64):
                    node = node_info(new_id().hex(), Role.DECODE)
                    await peer.send(Sealer(SECRET, Purpose.DISCOVERY, node.boot_id).seal(Register(node), ear.boot_id))
                for _ in range(64):
                    await peer.recv()
            assert len(ear.names()) == MAX_NODES
            await first.send(sealer.seal(NodeHeartbeat(NODE.boot_id, NodeLoad()), ear.boot_id))
            assert opener.open(await first.recv()).known
            assert ear.names()[0] == NODE.name
    # One each ten seconds, and ten minutes are more than this takes.
    assert 1 <= len([record for record in caplog.records if "registry is full" in record.message]) <= 60


async def test_an_oversized_frame_costs_its_sender_the_connection_and_no_other_peer_anything() -> None:
    async with listening() as ear, raw_peer(ear.control) as peer, registered(NODE, ear.control):
        await peer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        seen_s = ear.registry.snapshot().nodes[0].seen_s
        await eventually(lambda: ear.registry.snapshot().nodes[0].seen_s > seen_s, "a heartbeat after it")
        assert ear.names() == ["d0"]


async def test_a_message_without_end_costs_its_sender_the_connection_and_no_other_peer_anything() -> None:
    async with listening() as ear, registered(NODE, ear.control):
        assert not await asyncio.to_thread(sends_without_end, ear.port, MAX_MESSAGE_BYTES - 1, 20.0)
        seen_s = ear.registry.snapshot().nodes[0].seen_s
        await eventually(lambda: ear.registry.snapshot().nodes[0].seen_s > seen_s, "a heartbeat after it")
        assert ear.lost == []


async def test_a_message_of_very_many_parts_costs_its_sender_the_connection_and_no_other_peer_anything() -> None:
    async with listening() as ear, registered(NODE, ear.control):
        with many_parts(ear.port, 600_000, timeout_s=20.0) as connection:
            assert await asyncio.to_thread(is_cut, connection)
        seen_s = ear.registry.snapshot().nodes[0].seen_s
        await eventually(lambda: ear.registry.snapshot().nodes[0].seen_s > seen_s, "a heartbeat after it")
        assert ear.lost == []


async def test_a_busy_proxy_drops_no_node_while_it_drops_a_message_of_very_many_parts() -> None:
    async def other_work() -> None:
        while True:
            time.sleep(0.02)  # noqa: ASYNC251
            await asyncio.sleep(0)

    async with listening() as ear, registered(NODE, ear.control):
        with many_parts(ear.port, 100_000, timeout_s=20.0):
            busy = asyncio.create_task(other_work())
            try:
                await eventually(lambda: ear.dropped("malformed") == 1, "the message of many parts")
                seen_s = ear.registry.snapshot().nodes[0].seen_s
                await eventually(lambda: ear.registry.snapshot().nodes[0].seen_s > seen_s, "a heartbeat after it")
            finally:
                busy.cancel()
        assert ear.lost == []


async def test_connections_that_come_and_go_keep_no_other_from_being_cut() -> None:
    async def come_and_go(port: int) -> None:
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await asyncio.sleep(0.02)

    async with listening() as ear:
        others = asyncio.create_task(come_and_go(ear.port))
        try:
            assert not await asyncio.to_thread(sends_without_end, ear.port, MAX_MESSAGE_BYTES - 1, 5.0)
        finally:
            others.cancel()


async def test_every_message_is_acknowledged_to_its_sender() -> None:
    async with listening() as ear, raw_peer(ear.control) as peer:
        sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
        opener = Opener(SECRET, Purpose.DISCOVERY, Ack, receiver=NODE.boot_id)
        for message, known in (
            (NodeHeartbeat(NODE.boot_id, NodeLoad()), False),
            (Register(NODE), True),
            (NodeHeartbeat(NODE.boot_id, NodeLoad()), True),
        ):
            await peer.send(sealer.seal(message, ear.boot_id))
            assert opener.open(await peer.recv()) == Ack(NODE.boot_id, known)


async def test_an_address_in_use_is_a_configuration_error() -> None:
    async with listening() as ear:
        with pytest.raises(ConfigError, match=str(ear.port)):
            Ear(ear.port, time.monotonic, 1.0)


async def test_a_node_says_why_no_proxy_has_accepted_it() -> None:
    """The node meets another secret and a proxy that does not answer, and then one proxy that accepts it."""

    unanswered = "tcp://127.0.0.1:9"
    async with listening() as ear:
        refused = Registration(NODE, (ear.control, unanswered), b"another secret", HEARTBEAT_MS, NodeLoad)
        node = asyncio.create_task(refused.run())

        def said(proxy: str, standing: RegistrationStatus) -> bool:
            return f"{proxy} {standing.value}" in (refused.unaccepted or "")

        await eventually(lambda: said(ear.control, RegistrationStatus.SILENT), "the silence")
        await eventually(lambda: said(unanswered, RegistrationStatus.UNREACHED), "no proxy answers there")
        await cancelled(node)
        assert ear.names() == []
        async with registered(NODE, ear.control) as accepted:
            assert accepted.unaccepted is None
        assert "no proxy has accepted" in (accepted.unaccepted or "")


async def test_every_proxy_that_knows_a_node_hears_of_its_new_role_at_once() -> None:
    node = node_info("p0", Role.PREFILL)
    slow_s = 60.0
    async with listening(heartbeat_s=slow_s) as first, listening(heartbeat_s=slow_s) as second:
        nowhere = "tcp://127.0.0.1:1"
        async with registered(node, first.control, second.control) as registration:
            for role in (Role.DECODE, Role.DECODE, Role.PREFILL):
                assert await registration.announce(role, 10.0) == ()
                known = [ear.registry.node(node.boot_id) for ear in (first, second)]
                assert [info.role for info in known if info is not None] == [role, role]
        alone = Registration(node, (nowhere,), SECRET, HEARTBEAT_MS, NodeLoad)
        assert await alone.announce(Role.DECODE, 10.0) == (nowhere,), "nobody to wait for"
