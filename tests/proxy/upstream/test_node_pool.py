"""Connections to nodes are kept, closed or lost, and every wait for one is bounded."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import pytest

from pdserve.api.node.registration import STUCK_S
from pdserve.errors import Unavailable
from pdserve_proxy.upstream import node_pool
from pdserve_proxy.upstream.node_connection import (
    HIGH_WATER_BYTES,
    PROBE_S,
    SUSPECTED_S,
    UNANSWERED_S,
    NodeLost,
    NodeResponse,
    NodeUnreachable,
)
from pdserve_proxy.upstream.node_pool import NodePool, Origin, origin_of
from tests.proxy.cluster import eventually
from tests.proxy.fake_node import Exchange, FakeNode, answer_ok


@asynccontextmanager
async def node_and_pool(
    behaviour: Callable[[Exchange], Awaitable[None]] = answer_ok, *, most: int = 8
) -> AsyncIterator[tuple[FakeNode, NodePool]]:
    async with FakeNode(behaviour) as node:
        pool = NodePool(connect_timeout_s=5.0, max_connections=most)
        try:
            yield node, pool
        finally:
            pool.close()
            await eventually(lambda: not pool._open and not pool._idle, "all connections are closed")
            assert not pool._open_at


def post(node: FakeNode, pool: NodePool, silence_s: float | None = None) -> Coroutine[None, None, NodeResponse]:
    return pool.post(node.url, "/x", {"a": "b"}, b"body", silence_s=silence_s)


async def read_all(response: NodeResponse) -> bytes:
    pieces = []
    while piece := await response.read():
        pieces.append(piece)
    return b"".join(pieces)


async def hang(exchange: Exchange) -> None:
    await exchange.gone()


async def test_a_connection_is_kept_once_its_response_is_complete_however_it_was_read() -> None:
    async with node_and_pool() as (node, pool):
        first = await post(node, pool)
        await eventually(lambda: first.complete, "the answer is there")
        second = await post(node, pool)
        assert await read_all(first) == await read_all(second) == b'{"ok": true}'
        first.close()
        second.close()
        assert len(node._connections) == 1
        assert node.requests[0].body == b"body"
        assert node.requests[0].headers == {"host": node.url.removeprefix("http://"), "content-length": "4", "a": "b"}


async def test_a_kept_connection_that_the_node_has_closed_is_replaced() -> None:
    async def once_a_connection(exchange: Exchange) -> None:
        await exchange.answer(200, b"{}")
        exchange.die()

    async with node_and_pool(once_a_connection) as (node, pool):
        for _ in range(5):
            assert await read_all(await post(node, pool)) == b"{}"


async def test_a_burst_opens_no_more_connections_than_may_be_open() -> None:
    async with node_and_pool(most=3) as (node, pool):
        asked = await asyncio.gather(*(post(node, pool) for _ in range(20)), return_exceptions=True)
        assert sum(isinstance(answer, Unavailable) for answer in asked) == 20 - 3
        assert len(node._connections) == len(pool._open) == 3
        for answer in asked:
            if isinstance(answer, NodeResponse):
                answer.close()


async def test_a_connection_that_failed_takes_no_place() -> None:
    async with node_and_pool(most=1) as (node, pool):
        for _ in range(5):
            with pytest.raises(NodeUnreachable):
                await pool.post("http://127.0.0.1:1", "/x", {}, b"", silence_s=None)
        assert await read_all(await post(node, pool)) == b'{"ok": true}'


async def test_a_node_that_asks_for_it_gets_a_connection_for_each_request() -> None:
    async def last(exchange: Exchange) -> None:
        await exchange.answer(200, b"{}", connection="close")

    async with node_and_pool(last) as (node, pool):
        await read_all(await post(node, pool))
        assert not pool._idle


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        OK + b"a: b\r\n" * 20_000,
        OK + b"a: " + b"b" * 100_000,
        OK + b"retry-after: 1\r\n set-cookie: a=b\r\n\r\n",
        OK + b"retry-after: 1\rset-cookie: a=b\r\n\r\n",
        OK + b"retry-after: 1\nset-cookie: a=b\r\n\r\n",
        OK + b"retry-after: 1\x00\r\n\r\n",
        OK + b"re try: 1\r\n\r\n",
        OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        OK + b"content-length: -1\r\n\r\n",
        OK + b"content-length: 9" + b"9" * 40 + b"\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 1000 High\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
    ],
)
async def test_what_is_no_response_is_a_loss(head: bytes) -> None:
    async def speak(exchange: Exchange) -> None:
        await exchange._write(head)
        await exchange.gone()

    async with node_and_pool(speak) as (node, pool):
        with pytest.raises(NodeLost):
            await post(node, pool)


@pytest.mark.parametrize(
    "body",
    [
        CHUNKED + b"f" * 17 + b"\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"3\r\nabcdef\r\n",
        CHUNKED + b"3;" + b"x" * 100_000,
        CHUNKED + b"3\r\nabc\r\n0\r\n" + b"".join(b"t%d: x\r\n" % number for number in range(20_000)),
    ],
)
async def test_a_body_that_is_none_is_a_loss(body: bytes) -> None:
    async def speak(exchange: Exchange) -> None:
        await exchange._write(body)
        await exchange.gone()

    async with node_and_pool(speak) as (node, pool):
        async with asyncio.timeout(5):
            with pytest.raises(NodeLost, match=r"not HTTP|without any of a body"):
                await read_all(await post(node, pool))


async def test_what_comes_behind_the_last_chunk_becomes_no_header() -> None:
    async def speak(exchange: Exchange) -> None:
        await exchange._write(CHUNKED + b"2\r\n{}\r\n0\r\nretry-after: 1\r\n\r\n")

    async with node_and_pool(speak) as (node, pool):
        for _ in range(2):
            response = await post(node, pool)
            assert await read_all(response) == b"{}"
            assert response.headers == {"transfer-encoding": "chunked"}
        assert len(node._connections) == 1


async def test_interim_answers_are_skipped() -> None:
    async def speak(exchange: Exchange) -> None:
        await exchange._write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await exchange.answer(200, b"{}")

    async with node_and_pool(speak) as (node, pool):
        for _ in range(2):
            response = await post(node, pool)
            assert (response.status, await read_all(response)) == (200, b"{}")
            assert "link" not in response.headers
        assert len(node._connections) == 1


async def test_a_connection_whose_request_was_answered_before_it_had_left_is_not_used_again() -> None:
    async with node_and_pool() as (_, pool):

        async def answer_the_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK + b"content-length: 2\r\n\r\n{}")
            await ended.wait()
            writer.transport.abort()

        ended = asyncio.Event()
        server = await asyncio.start_server(answer_the_head, "127.0.0.1", 0, limit=2**16)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        for _number in range(2):
            async with asyncio.timeout(5):
                response = await pool.post(url, "/x", {}, b"x" * 2**25, silence_s=None)
                assert await read_all(response) == b"{}"
        ended.set()
        server.close()


async def test_a_node_that_answers_more_than_it_was_asked_is_not_asked_there_again() -> None:
    def answer(status: bytes, body: bytes) -> bytes:
        return b"HTTP/1.1 %b x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)

    async def twice(exchange: Exchange) -> None:
        await exchange._write(answer(b"200", b"asked") + answer(b"500", b"unasked"))
        await exchange.gone()

    async with node_and_pool(twice) as (node, pool):
        for _ in range(3):
            response = await post(node, pool)
            assert (response.status, await read_all(response)) == (200, b"asked")
            await eventually(lambda: not pool._open, "the connection is closed")


async def test_half_an_answer_too_much_becomes_no_other_requests_answer() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    async def half_more(exchange: Exchange) -> None:
        await exchange._write(whole + whole[:20])

    async with node_and_pool(half_more) as (node, pool):
        assert await read_all(await post(node, pool)) == b"{}"
        with pytest.raises(NodeLost, match="not HTTP"):
            await post(node, pool)
        assert not pool._idle


async def test_silence_is_a_loss_also_on_a_kept_connection() -> None:
    async def first_only(exchange: Exchange) -> None:
        await (answer_ok if exchange.request is node_requests[0] else hang)(exchange)

    node_requests = []

    async with node_and_pool(first_only) as (node, pool):
        node_requests = node.requests
        await read_all(await post(node, pool))
        with pytest.raises(NodeLost, match="silent"):
            await post(node, pool, silence_s=0.1)
        assert len(node.requests) == 2


async def test_a_node_that_is_not_read_from_is_not_silent() -> None:
    size = 64 * HIGH_WATER_BYTES

    async def much(exchange: Exchange) -> None:
        await exchange.answer(200, b"x" * size)

    async with node_and_pool(much) as (node, pool):
        response = await post(node, pool, silence_s=0.1)
        await eventually(lambda: response._held >= HIGH_WATER_BYTES, "it has taken as much as it may")
        await asyncio.sleep(0.3)  # This is longer than a node may be silent.
        assert response._held < size // 2
        assert len(await read_all(response)) == size


async def test_one_that_is_given_up_closes_its_connection_and_fails_who_reads() -> None:
    async def begin(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.gone()

    async with node_and_pool(begin) as (node, pool):
        response = await post(node, pool)
        reading = asyncio.create_task(response.read())
        await asyncio.sleep(0)
        response.close()
        with pytest.raises(NodeLost, match="the proxy closed"):
            await reading
        await eventually(lambda: not node._connections, "the node sees it")


async def test_a_post_that_is_cancelled_closes_its_connection() -> None:
    async with node_and_pool(hang) as (node, pool):
        posting = asyncio.create_task(post(node, pool))
        await eventually(lambda: bool(node.requests), "the node has it")
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting
        await eventually(lambda: not node._connections, "the node sees it")


async def test_connections_are_bounded_and_an_idle_one_makes_room() -> None:
    async with node_and_pool(most=1) as (node, pool), FakeNode(hang) as other:
        await read_all(await post(node, pool))
        posting = asyncio.create_task(post(other, pool))
        await eventually(lambda: bool(other.requests), "the idle one made room")
        with pytest.raises(Unavailable):
            await post(node, pool)
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
        await eventually(lambda: not pool._open, "the connection is closed")
        await read_all(await post(node, pool))


async def test_an_idle_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pool, "IDLE_S", 0.05)

    async with node_and_pool() as (node, pool):
        await read_all(await post(node, pool))
        assert pool._idle
        await eventually(lambda: not pool._open, "it is closed")


async def test_a_node_in_doubt_loses_what_waits_for_it_and_no_other_node_does() -> None:
    async with node_and_pool(hang) as (node, pool), FakeNode() as other:
        await read_all(await post(other, pool))
        whole = asyncio.create_task(post(node, pool))
        stream = asyncio.create_task(post(node, pool, silence_s=600.0))
        await eventually(lambda: len(node.requests) == 2, "the node has both")
        pool.suspect(node.url)
        with pytest.raises(NodeLost, match="heartbeats ended"):
            await whole
        with pytest.raises(NodeLost, match="silent for"):
            await stream
        await read_all(await post(other, pool))
        assert len(other._connections) == 1


async def test_an_idle_connection_to_a_node_in_doubt_is_closed_and_a_new_one_is_made() -> None:
    async with node_and_pool() as (node, pool):
        await read_all(await post(node, pool))
        pool.suspect(node.url)
        await eventually(lambda: not pool._open and not pool._idle, "the connection is closed")
        assert await read_all(await post(node, pool)) == b'{"ok": true}'


@contextmanager
def deaf() -> Iterator[str]:
    """The URL of a host that answers no attempt to connect, because its queue of connections is full."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield "http://{}:{}".format(*listener.getsockname())


async def test_who_connects_to_a_node_in_doubt_waits_no_longer() -> None:
    async with node_and_pool() as (_, pool):
        with deaf() as url:
            posting = asyncio.create_task(pool.post(url, "/x", {}, b"", silence_s=None))
            done, _waiting = await asyncio.wait([posting], timeout=0.2)
            assert not done
            pool.suspect(url)
            async with asyncio.timeout(3):  # Connecting may take 5 s.
                with pytest.raises(NodeUnreachable):
                    await posting


def stand_still(seconds: float) -> None:
    """Keeps the event loop from all else, as a stopped process is kept."""
    time.sleep(seconds)


async def test_the_time_in_which_the_proxy_itself_is_busy_does_not_count_against_a_node() -> None:
    async with FakeNode(hang) as node:
        pool = NodePool(connect_timeout_s=0.2, max_connections=8)
        try:
            posting = asyncio.create_task(post(node, pool))
            # Behind the attempt to connect: as with the requests of thousands of other clients.
            asyncio.get_running_loop().call_soon(stand_still, 0.5)
            await eventually(lambda: bool(node.requests), "the node has the request")
            posting.cancel()
        finally:
            pool.close()


async def test_what_has_come_from_a_node_in_doubt_is_read_before_it_counts_as_silent() -> None:
    answered = asyncio.Event()

    async def answer_in_parts(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"one")
        await answered.wait()
        await exchange.chunk(b"two")
        await exchange.finish()

    async with node_and_pool(answer_in_parts) as (node, pool):
        response = await post(node, pool, silence_s=600.0)
        assert await response.read() == b"one"
        answered.set()
        stand_still(1.2 * SUSPECTED_S)
        pool.suspect(node.url)
        assert await read_all(response) == b"two"


async def test_attempts_to_connect_count_as_connections() -> None:
    async with node_and_pool(most=2) as (node, pool):
        posting = [asyncio.create_task(post(node, pool)) for _ in range(5)]
        results = await asyncio.gather(*posting, return_exceptions=True)
        assert [type(result) for result in results] == [NodeResponse] * 2 + [Unavailable] * 3
        assert len(node._connections) == 2


async def test_the_kernel_looks_after_connections_that_nothing_is_heard_on() -> None:
    async with node_and_pool() as (node, pool):
        await read_all(await post(node, pool))
        (connection,) = pool._open
        options = connection._transport.get_extra_info("socket")
        assert options.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PROBE_S
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == PROBE_S
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNANSWERED_S * 1000
        # A node that lives may be silent for so long, and is not to be cut off before its heartbeats end.
        assert UNANSWERED_S > STUCK_S


async def test_a_host_that_refuses_connections() -> None:
    async with node_and_pool() as (node, pool):
        await node.stop()
        with pytest.raises(NodeUnreachable):
            await post(node, pool)


@contextmanager
def no_file_left() -> Iterator[None]:
    """Lets this process open no further file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    with ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 16, limits[0]), limits[1]))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with suppress(OSError):
            while True:
                files.callback(os.close, os.dup(0))
        yield


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "node.invalid"])
async def test_a_lack_of_files_is_not_taken_for_an_unreachable_node(name: str) -> None:
    async with node_and_pool() as (node, pool):
        with suppress(NodeUnreachable):  # This loads the resolver's threads and libraries.
            await pool.post("http://localhost:1", "/x", {}, b"", silence_s=None)
        url = node.url.replace("127.0.0.1", name)
        with no_file_left():
            with pytest.raises(Unavailable) as lack:
                await pool.post(url, "/x", {}, b"body", silence_s=None)
            assert lack.value.code == "no_connection_left"
        assert not pool._open and not pool._connecting
        assert await read_all(await post(node, pool)) == b'{"ok": true}'


def test_where_a_url_leads() -> None:
    where = Origin(host="::1", port=443, tls=True, authority="[::1]", path_prefix="/base")
    assert origin_of("https://[::1]/base/") == where
