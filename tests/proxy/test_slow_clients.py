"""Clients that do not read, or only hold connections: they cost bounded memory, and no time of other clients."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest

from pdserve.http.guard import GuardedHttp
from pdserve.wire.discovery import Role
from tests.proxy.cluster import Cluster, cluster, eventually, metric, node_info, proxy_config, registered
from tests.proxy.fake_node import Exchange, FakeNode
from tests.proxy.test_server import proxy_process

pytestmark = pytest.mark.integration

FLOOD_CHUNKS = 768
CHUNK = b"data: " + b"x" * 2**17 + b"\n\n"
"""96 MiB in all: more than all socket buffers on the way can hold."""
IDLE_CONNECTIONS = 10_000
HIGH_WATER_BYTES = 2**16
"""The limit of a client's transport."""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


class Flood:
    """A node that streams far more than fits on the way, or for a body with ``ping`` one event for each ``go_on``."""

    def __init__(self) -> None:
        self.stalled, self.finished, self.gone, self.go_on = (asyncio.Event() for _ in range(4))

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.begin_stream()
        if b"ping" in exchange.request.body:
            for _ in range(50):
                await exchange.chunk(b"data: ping\n\n")
                await self.go_on.wait()
                self.go_on.clear()
            await exchange.finish()
            return
        try:
            for _ in range(FLOOD_CHUNKS):
                sending = asyncio.create_task(exchange.chunk(CHUNK))
                await asyncio.wait([sending], timeout=0.5)
                if not sending.done():
                    self.stalled.set()
                await sending
            await exchange.finish()
            self.finished.set()
        except ConnectionError:
            self.gone.set()


@asynccontextmanager
async def stalled_reader(running: Cluster) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has asked for a stream. Its reader stops to take bytes from the socket at twice its limit."""
    host, _, port = running.addresses.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**14)
    with closing(writer):
        body = b'{"model": "m", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        yield reader


async def test_a_reader_that_stops_stops_its_own_node_and_no_other_and_loses_nothing() -> None:
    flood = Flood()
    async with FakeNode(flood) as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with stalled_reader(running) as reader:
            async with asyncio.timeout(20):
                await flood.stalled.wait()
            async with running.chat(stream=True, user="ping") as response:
                for _ in range(50):
                    assert await response.content.readany() == b"data: ping\n\n"
                    flood.go_on.set()
            assert not flood.finished.is_set()
            assert not flood.gone.is_set()
            size = 0
            while piece := await reader.read(2**20):
                size += len(piece)
            assert flood.finished.is_set()
            assert size >= FLOOD_CHUNKS * len(CHUNK)


async def test_a_reader_that_does_not_go_on_is_cut_off_and_frees_its_node() -> None:
    flood = Flood()
    async with FakeNode(flood) as node, cluster(proxy_config(write_timeout_s=0.3)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with stalled_reader(running):
            async with asyncio.timeout(20):
                await flood.gone.wait()

            async def client_gone() -> bool:
                return await metric(running, 'pdserve_proxy_outcomes_total{outcome="client_gone"}') == 1

            await eventually(client_gone, "it counts as a client that left")


ANSWER = b'{"text": "%b"}' % (b"x" * 24 * 2**20)
"""More than the kernel's buffers on the way can hold, in one piece."""


async def large_answer(exchange: Exchange) -> None:
    """Answers a body with ``stream``, as ``stalled_reader`` sends it, with one large answer."""
    await exchange.answer(200, ANSWER if b"stream" in exchange.request.body else b"{}")


def unread_bytes() -> int:
    """Returns the bytes that this process holds for the clients of its HTTP servers."""
    # Not isinstance: libraries have objects that answer for their class, with a warning.
    servers = [thing for thing in gc.get_objects() if issubclass(type(thing), GuardedHttp)]
    return sum(server.transport.get_write_buffer_size() for server in servers if server.transport is not None)


async def test_a_whole_answer_waits_for_its_reader_and_keeps_its_place_until_it_is_taken() -> None:
    config = proxy_config()
    config = dataclasses.replace(config, admission=dataclasses.replace(config.admission, max_in_flight=1))
    async with FakeNode(large_answer) as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))

        async def waiting() -> bool:
            return await metric(running, "pdserve_proxy_requests_queued") == 1

        async with stalled_reader(running) as reader:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"\r\ncontent-length: %d\r\n" % len(ANSWER) in head
            ordinary = asyncio.create_task(running.chat().__aenter__())
            await eventually(waiting, "the place is not free")
            assert unread_bytes() <= 3 * HIGH_WATER_BYTES
            assert await reader.readexactly(len(ANSWER)) == ANSWER
            assert (await ordinary).status == 200
            assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 2


async def test_a_whole_answer_that_is_not_read_is_cut_off_and_gives_its_place_back() -> None:
    config = proxy_config(write_timeout_s=0.3)
    config = dataclasses.replace(config, admission=dataclasses.replace(config.admission, max_in_flight=1))
    async with FakeNode(large_answer) as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with stalled_reader(running) as reader:
            await reader.readuntil(b"\r\n\r\n")
            async with running.chat() as response:
                assert response.status == 200
            assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="client_gone"}') == 1


async def test_ten_thousand_idle_connections_are_harmless() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(IDLE_CONNECTIONS, hard - 500)

    async def ping(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for number in range(64):
            await exchange.chunk(b"data: %d\n\n" % number)
        await exchange.finish()

    async def keep(http: str, port: int) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(http, port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b'"ok"}')
        return writer

    async with (
        FakeNode(ping) as node,
        proxy_process(drain_s=1) as (process, url, control),
        registered(node_info("x", Role.MIXED, node.url), control),
    ):
        host, _, port = url.removeprefix("http://").partition(":")
        idle = [await keep(host, int(port))]
        memory = resident_bytes(process.pid)
        while len(idle) < count:
            batch = min(250, count - len(idle))
            idle += await asyncio.gather(*(keep(host, int(port)) for _ in range(batch)))
        # Less than what one of them could have unread before its stream stops: nothing is set aside for it.
        assert resident_bytes(process.pid) - memory < count * HIGH_WATER_BYTES / 2
        async with aiohttp.ClientSession(url) as http:

            async def ask() -> None:
                async with http.post("/v1/completions", json={"stream": True}) as response:
                    assert (await response.read()).count(b"data: ") == 64

            await asyncio.gather(*(ask() for _ in range(32)))
        assert not any(writer.transport.is_closing() for writer in idle)
        for writer in idle:
            writer.transport.abort()
        assert process.returncode is None
