"""Bodies that come slowly, or not at all, keep no other request out; the memory of bodies is bounded and freed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import pytest

from pdserve.config import AdmissionConfig, ProxyConfig
from pdserve.wire.discovery import Role
from pdserve_proxy import relayed_routes, serving
from pdserve_proxy.requests.held_bodies import BodyLimits, HeldBodies
from pdserve_proxy.requests.request_body import GenerationBody, read_body
from tests.proxy.cluster import Cluster, cancelled, cluster, error_of, eventually, node_info, proxy_config
from tests.proxy.fake_node import Exchange, FakeNode

Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ALICE, BOB = "alices-key-0123456789", "bobs-key-0123456789"


def config_with(admission: AdmissionConfig, **fields: int) -> ProxyConfig:
    return dataclasses.replace(proxy_config(**fields), admission=admission)  # type: ignore[arg-type]


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[HeldBodies]:
    """Collects the ``HeldBodies`` of every proxy that starts: the last one is that of the running proxy."""
    made: list[HeldBodies] = []

    class Watched(HeldBodies):
        def __init__(self, limits: BodyLimits) -> None:
            super().__init__(limits)
            made.append(self)

    monkeypatch.setattr(serving, "HeldBodies", Watched)
    return made


@asynccontextmanager
async def connected(running: Cluster) -> AsyncIterator[Stream]:
    host, _, port = running.addresses.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(length: int, *fields: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {length}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    """Returns the status and the error of one response."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    length = next(int(line[16:]) for line in lines if line.startswith("content-length: "))
    return int(lines[0].split()[1]), error_of(await reader.readexactly(length))


async def ordinary(running: Cluster, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with running.http.post("/v1/completions", json={"model": "m"}, headers=headers) as response:
        await response.read()
        return response.status


async def test_heads_without_bodies_take_no_place_among_the_requests_under_way(bodies: list[HeldBodies]) -> None:
    config = config_with(AdmissionConfig(max_in_flight=2, max_queued=8, max_uploads=32))
    async with FakeNode() as node, cluster(config) as running, AsyncExitStack() as held:
        await running.add(node_info("x", Role.MIXED, node.url))
        slow = [await held.enter_async_context(connected(running)) for _ in range(6)]
        for _, writer in slow:
            writer.write(head(17) + b'{"model"')
        await eventually(lambda: bodies[-1].total.uploads == len(slow), "all are on their way")
        assert await ordinary(running) == 200
        for _, writer in slow:
            writer.write(b': "m"   }')
        for reader, _ in slow:
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (bodies[-1].total.uploads, bodies[-1].total.large_bytes) == (0, 0)


async def test_a_client_has_its_share_of_the_bodies_on_their_way_and_others_have_theirs(
    bodies: list[HeldBodies],
) -> None:
    config = config_with(AdmissionConfig(api_keys=(ALICE, BOB), max_uploads=8))
    async with FakeNode() as node, cluster(config) as running, AsyncExitStack() as held:
        await running.add(node_info("x", Role.MIXED, node.url))

        async def upload(key: str) -> Stream:
            stream = await held.enter_async_context(connected(running))
            stream[1].write(head(100, f"authorization: Bearer {key}") + b"{")
            return stream

        slow = [await upload(ALICE) for _ in range(2)]
        await eventually(lambda: bodies[-1].total.uploads == 2, "two are on their way")
        third, _ = await upload(ALICE)
        status, error = await answer_of(third)
        assert (status, error["code"]) == (429, "too_many_uploads")
        await upload(BOB)
        await eventually(lambda: bodies[-1].total.uploads == 3, "another key's is on its way")
        assert await ordinary(running, BOB) == 200
        slow[0][1].close()  # A client that leaves gives its place back.
        await eventually(lambda: bodies[-1].total.uploads == 2, "one is gone")
        await upload(ALICE)
        await eventually(lambda: bodies[-1].total.uploads == 3, "its place is taken again")


async def test_bodies_that_wait_for_their_turn_have_bounded_memory(bodies: list[HeldBodies]) -> None:
    entered, let_go = asyncio.Event(), asyncio.Event()

    async def hold(exchange: Exchange) -> None:
        entered.set()
        await let_go.wait()
        await exchange.answer(200, b"{}")

    config = config_with(AdmissionConfig(max_in_flight=1, body_memory_mib=3), max_body_bytes=2**20)
    large = b'{"model": "m", "user": "%b"}' % (b"x" * 700_000)
    async with FakeNode(hold) as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))

        async def send() -> int:
            async with running.http.post("/v1/completions", data=large) as response:
                await response.read()
                return response.status

        first = asyncio.create_task(send())
        await entered.wait()
        second = asyncio.create_task(send())
        await eventually(lambda: bodies[-1].total.large_bytes == 2 * len(large), "one waits for its turn")
        assert await send() == 429, "a client has half of the memory"
        assert bodies[-1].total.large_bytes == 2 * len(large)
        let_go.set()
        assert set(await asyncio.gather(first, second)) == {200}
        assert bodies[-1].total.large_bytes == 0
        assert await send() == 200


async def test_a_body_is_held_no_longer_than_until_its_stream_begins(bodies: list[HeldBodies]) -> None:
    over = asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"data: 1\n\n")
        await over.wait()
        await exchange.finish()

    async with FakeNode(stream) as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat(stream=True, user="x" * 500_000) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            assert bodies[-1].total.large_bytes == 0
            over.set()
            await response.read()


async def test_large_bodies_are_read_one_in_a_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model": "m", "a": [%b[]]}' % (b"[]," * 200_000)
    turns = 0
    read_at: list[int] = []

    def watched(data: bytes) -> GenerationBody:
        if len(data) == len(body):
            read_at.append(turns)
        return read_body(data)

    monkeypatch.setattr(relayed_routes, "read_body", watched)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    routes = relayed_routes.RelayedRoutes.__new__(relayed_routes.RelayedRoutes)
    routes._large_body = asyncio.Lock()
    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(routes._read_large(body) for _ in range(8)))
    await cancelled(counting)
    assert len(read_at) == 8
    assert len(set(read_at)) == 8


@pytest.mark.parametrize(
    ("length", "status"), [("0" * 5000 + "15", 200), ("0" * 5000 + "9" * 18, 413), ("0" * 5000, 400)]
)
async def test_a_length_with_many_zeros_is_a_number_like_any_other(length: str, status: int) -> None:
    async with FakeNode() as node, cluster() as running, connected(running) as (reader, writer):
        await running.add(node_info("x", Role.MIXED, node.url))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode())
        writer.write(b'{"model":  "m"}')
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 %d " % status)


async def test_a_body_that_is_encoded_gets_415_before_it_is_read() -> None:
    async with FakeNode() as node, cluster() as running, connected(running) as (reader, writer):
        await running.add(node_info("x", Role.MIXED, node.url))
        writer.write(head(100, "content-encoding: gzip"))
        status, error = await answer_of(reader)
        assert (status, error["code"]) == (415, "unsupported_content_encoding")
        headers = {"content-encoding": "Identity"}
        async with running.http.post("/v1/completions", data=b"{}", headers=headers) as response:
            assert response.status == 200
        assert len(node.requests) == 1


async def test_a_body_in_thousands_of_tiny_chunks_is_refused_and_one_in_small_ones_is_not() -> None:
    def chunks(size: int, count: int) -> bytes:
        body = b"%x\r\n%b\r\n" % (size, b" " * size) * count + b"2\r\n{}\r\n0\r\n\r\n"
        return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + body

    async with FakeNode() as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        for size, count, status in ((1, 5000, 400), (1, 4000, 200), (64, 5000, 200)):
            async with connected(running) as (reader, writer):
                writer.write(chunks(size, count))
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 %d " % status), (size, count)
        assert len(node.requests) == 2


async def test_a_url_that_is_long_to_take_apart_is_refused() -> None:
    async with cluster() as running:
        for length, status in ((8000, 404), (9000, 414)):
            async with connected(running) as (reader, writer):
                writer.write(b"GET /v1/models/%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"%" * length))
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 %d " % status)
