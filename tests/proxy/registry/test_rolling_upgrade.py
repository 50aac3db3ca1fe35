"""Nodes and proxies of two versions over real sockets, and frames that were meant for another proxy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack
import msgspec
import pytest
import zmq
import zmq.asyncio

from pdserve.api.node.registration import Registration
from pdserve.control.frame import NAMED, Opener, Purpose, Sealer
from pdserve.wire.discovery import (
    Ack,
    FromProxy,
    NodeHeartbeat,
    NodeHello,
    NodeLoad,
    ProxyRefusal,
    ProxyWelcome,
    Register,
    Role,
)
from pdserve.wire.ids import new_id
from pdserve.wire.version import SPOKEN
from tests.proxy.cluster import HEARTBEAT_MS, SECRET, cancelled, eventually, node_info, registered
from tests.proxy.registry.test_discovery import listening, raw_peer

NODE = node_info("d0", Role.DECODE)


class NextHello(msgspec.Struct, tag_field="kind", tag="hello"):
    boot_id: bytes
    nonce: bytes
    protocol: int
    oldest_protocol: int
    region: str = "eu"


@pytest.mark.parametrize("oldest", [SPOKEN.newest, SPOKEN.newest + 1])
async def test_a_node_of_a_newer_release_is_taken_or_refused_by_name(oldest: int) -> None:
    async with listening() as ear, raw_peer(ear.control) as node:
        nonce = new_id()
        sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
        opener: Opener[FromProxy] = Opener(
            SECRET,
            Purpose.DISCOVERY,
            FromProxy,  # type: ignore[arg-type]
            receiver=NODE.boot_id,
        )
        await node.send(sealer.seal(NextHello(NODE.boot_id, nonce, oldest + 1, oldest)))
        answer = opener.open_from(await node.recv())
        if oldest <= SPOKEN.newest:
            assert isinstance(answer.message, ProxyWelcome)
            assert (answer.message.nonce, answer.message.protocol) == (nonce, SPOKEN.newest)
            return
        assert isinstance(answer.message, ProxyRefusal)
        assert f"protocol is {oldest} to {oldest + 1} here and {SPOKEN} at the proxy" in answer.message.reason
        info = msgspec.structs.replace(NODE, protocol=oldest + 1, oldest_protocol=oldest)
        await node.send(sealer.seal(Register(info), answer.sender))
        refused = opener.open(await node.recv())
        assert isinstance(refused, ProxyRefusal) and "protocol" in refused.reason
        assert ear.names() == []


async def test_what_a_proxy_cannot_take_is_said_at_the_node(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with listening() as ear:
            bad = node_info("bad", Role.DECODE, url="ftp://nonsense")
            registration = Registration(bad, (ear.control,), SECRET, HEARTBEAT_MS, NodeLoad)
            node = asyncio.create_task(registration.run())
            await eventually(lambda: "refuses this node" in caplog.text, "the refusal in the node's log")
            assert "it must be http://host:port or https://host:port" in caplog.text
            assert not registration.registered[ear.control].is_set()
            await cancelled(node)


# ------------------------------------------------------------ one proxy's frames at another


@asynccontextmanager
async def overheard(control: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A connection to ``control`` that records every frame of a node."""
    heard: list[bytes] = []
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as near, context.socket(zmq.DEALER) as far:
        for socket in (near, far):
            socket.set(zmq.LINGER, 0)
        port = near.bind_to_random_port("tcp://127.0.0.1")
        far.connect(control)
        route = b""

        async def there() -> None:
            nonlocal route
            while True:
                route, frame = await near.recv_multipart()
                heard.append(frame)
                await far.send(frame)

        async def back() -> None:
            while True:
                frame = await far.recv()
                await near.send_multipart([route, frame])

        tasks = [asyncio.create_task(there()), asyncio.create_task(back())]
        try:
            yield f"tcp://127.0.0.1:{port}", heard
        finally:
            for task in tasks:
                await cancelled(task)


async def test_frames_for_one_proxy_are_good_at_no_other_and_not_at_its_next_start() -> None:
    async with listening() as other:
        async with listening() as ear, overheard(ear.control) as (control, heard):
            async with registered(NODE, control):
                await eventually(lambda: len(heard) > 6, "several heartbeats")
            await eventually(lambda: ear.names() == [], "the node is deregistered")
            port = ear.port
        async with listening(port) as restarted:
            for proxy in (other, restarted):
                async with raw_peer(proxy.control) as thief:
                    for frame in heard:
                        await thief.send(frame)
                    refused = sum(msgpack.unpackb(frame)[0] == NAMED for frame in heard)
                    await eventually(lambda p=proxy, n=refused: p.dropped("late") >= n, "refusals")
                    assert proxy.names() == []


async def test_a_goodbye_for_another_proxy_ends_nothing_here() -> None:
    async with (
        listening() as here,
        listening() as there,
        overheard(there.control) as (control, heard),
        registered(NODE, here.control),
    ):
        # The same node at another proxy, which it leaves.
        async with registered(NODE, control):
            pass
        await eventually(lambda: there.names() == [], "the node is deregistered")
        async with raw_peer(here.control) as thief:
            for frame in heard:
                await thief.send(frame)
            await eventually(lambda: here.dropped("late") >= 2, "refusals")
        assert here.names() == ["d0"]
        assert here.lost == []


async def test_a_restarted_proxy_asks_who_means_its_former_self_to_greet_again() -> None:
    async with listening() as ear, raw_peer(ear.control) as node:
        sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
        opener = Opener(SECRET, Purpose.DISCOVERY, Ack, receiver=NODE.boot_id)
        await node.send(sealer.seal(NodeHeartbeat(NODE.boot_id, NodeLoad()), new_id()))
        assert opener.open(await node.recv()) == Ack(NODE.boot_id, known=False)


async def test_only_a_greeting_may_name_nobody_and_it_registers_no_node() -> None:
    async with listening() as ear, raw_peer(ear.control) as node:
        sealer = Sealer(SECRET, Purpose.DISCOVERY, NODE.boot_id)
        await node.send(sealer.seal(NodeHello(NODE.boot_id, new_id(), SPOKEN.newest, SPOKEN.oldest)))
        await node.recv()
        await node.send(sealer.seal(Register(NODE)))
        await node.send(sealer.seal(NodeHeartbeat(NODE.boot_id, NodeLoad())))
        await eventually(lambda: ear.dropped("authentication") == 2, "both are dropped")
        assert ear.names() == []


async def test_nodes_keep_the_interval_that_the_proxy_tells_them() -> None:
    # By its own setting it would be dropped again and again.
    async with listening(heartbeat_s=0.1) as ear, registered(NODE, ear.control, heartbeat_ms=60_000):
        first = ear.registry.snapshot().nodes[0].seen_s
        await eventually(lambda: ear.registry.snapshot().nodes[0].seen_s > first + 1.0, "many heartbeats")
        assert ear.lost == []
