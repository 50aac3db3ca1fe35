"""Connections to nodes: kept, given up, lost, and never waited for without a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from pdserve.errors import Unavailable
from pdserve_proxy import node_pool
from pdserve_proxy.node_connection import HIGH_WATER_BYTES, NodeLost, NodeResponse, NodeUnreachable
from pdserve_proxy.node_pool import NodePool, Origin, origin_of
from tests.proxy.cluster import eventually, run_async
from tests.proxy.fake_node import Exchange, FakeNode, answer_ok

Scenario = Callable[[FakeNode, NodePool], Coroutine[None, None, None]]


def run(scenario: Scenario, behaviour: Callable[[Exchange], Awaitable[None]] = answer_ok, *, most: int = 8) -> None:
    async def whole() -> None:
        async with FakeNode(behaviour) as node:
            pool = NodePool(connect_timeout_s=5.0, max_connections=most)
            try:
                await scenario(node, pool)
            finally:
                pool.close()
                await eventually(lambda: not pool._open and not pool._idle, "all connections are closed")

    run_async(whole())


def post(node: FakeNode, pool: NodePool, silence_s: float | None = None) -> Coroutine[None, None, NodeResponse]:
    return pool.post(node.url, "/x", {"a": "b"}, b"body", silence_s=silence_s)


async def read_all(response: NodeResponse) -> bytes:
    pieces = []
    while piece := await response.read():
        pieces.append(piece)
    return b"".join(pieces)


async def hang(exchange: Exchange) -> None:
    await exchange.gone()


def test_a_connection_is_kept_once_its_response_is_complete_whoever_has_read_it() -> None:
    async def scenario(node: FakeNode, pool: NodePool) -> None:
        first = await post(node, pool)
        await eventually(lambda: first.complete, "the answer is there")
        second = await post(node, pool)
        assert await read_all(first) == await read_all(second) == b'{"ok": true}'
        first.close()
        second.close()
        assert len(node._connections) == 1
        assert node.requests[0].body == b"body"
        assert node.requests[0].headers == {"host": node.url.removeprefix("http://"), "content-length": "4", "a": "b"}

    run(scenario)


def test_a_kept_connection_that_the_node_has_closed_is_replaced() -> None:
    async def once_a_connection(exchange: Exchange) -> None:
        await exchange.answer(200, b"{}")
        exchange.die()

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        for _ in range(5):
            assert await read_all(await post(node, pool)) == b"{}"

    run(scenario, once_a_connection)


def test_a_node_that_asks_for_it_gets_a_connection_for_each_request() -> None:
    async def last(exchange: Exchange) -> None:
        await exchange.answer(200, b"{}", connection="close")

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        await read_all(await post(node, pool))
        assert not pool._idle

    run(scenario, last)


@pytest.mark.parametrize("head", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000])
def test_what_is_no_response_is_a_loss(head: bytes) -> None:
    async def speak(exchange: Exchange) -> None:
        await exchange._write(head)
        await exchange.gone()

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        with pytest.raises(NodeLost):
            await post(node, pool)

    run(scenario, speak)


def test_a_node_that_answers_more_than_it_was_asked_is_not_asked_there_again() -> None:
    def answer(status: bytes, body: bytes) -> bytes:
        return b"HTTP/1.1 %b x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)

    async def twice(exchange: Exchange) -> None:
        await exchange._write(answer(b"200", b"asked") + answer(b"500", b"unasked"))
        await exchange.gone()

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        for _ in range(3):
            response = await post(node, pool)
            assert (response.status, await read_all(response)) == (200, b"asked")
            await eventually(lambda: not pool._open, "the connection is closed")

    run(scenario, twice)


def test_half_an_answer_too_much_becomes_no_other_requests_answer() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    async def half_more(exchange: Exchange) -> None:
        await exchange._write(whole + whole[:20])

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        assert await read_all(await post(node, pool)) == b"{}"
        with pytest.raises(NodeLost, match="not HTTP"):
            await post(node, pool)
        assert not pool._idle

    run(scenario, half_more)


def test_silence_is_a_loss_also_on_a_kept_connection() -> None:
    async def first_only(exchange: Exchange) -> None:
        await (answer_ok if exchange.request is node_requests[0] else hang)(exchange)

    node_requests = []

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        nonlocal node_requests
        node_requests = node.requests
        await read_all(await post(node, pool))
        with pytest.raises(NodeLost, match="silent"):
            await post(node, pool, silence_s=0.1)
        assert len(node.requests) == 2

    run(scenario, first_only)


def test_a_node_that_is_not_read_from_is_not_silent() -> None:
    size = 64 * HIGH_WATER_BYTES

    async def much(exchange: Exchange) -> None:
        await exchange.answer(200, b"x" * size)

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        response = await post(node, pool, silence_s=0.1)
        await eventually(lambda: response._held >= HIGH_WATER_BYTES, "it has taken as much as it may")
        await asyncio.sleep(0.3)  # longer than silence is borne: that is the test
        assert response._held < size // 2
        assert len(await read_all(response)) == size

    run(scenario, much)


def test_one_that_is_given_up_closes_its_connection_and_fails_who_reads() -> None:
    async def begin(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.gone()

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        response = await post(node, pool)
        reading = asyncio.create_task(response.read())
        await asyncio.sleep(0)
        response.close()
        with pytest.raises(NodeLost, match="given up"):
            await reading
        await eventually(lambda: not node._connections, "the node sees it")

    run(scenario, begin)


def test_a_post_that_is_cancelled_closes_its_connection() -> None:
    async def scenario(node: FakeNode, pool: NodePool) -> None:
        posting = asyncio.create_task(post(node, pool))
        await eventually(lambda: bool(node.requests), "the node has it")
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting
        await eventually(lambda: not node._connections, "the node sees it")

    run(scenario, hang)


def test_connections_are_bounded_and_an_idle_one_makes_room() -> None:
    async def scenario(node: FakeNode, pool: NodePool) -> None:
        async with FakeNode(hang) as other:
            await read_all(await post(node, pool))
            posting = asyncio.create_task(post(other, pool))
            await eventually(lambda: bool(other.requests), "the idle one made room")
            with pytest.raises(Unavailable):
                await post(node, pool)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
            await eventually(lambda: not pool._open, "the connection is closed")
            await read_all(await post(node, pool))

    run(scenario, most=1)


def test_an_idle_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pool, "IDLE_S", 0.05)

    async def scenario(node: FakeNode, pool: NodePool) -> None:
        await read_all(await post(node, pool))
        assert pool._idle
        await eventually(lambda: not pool._open, "it is closed")

    run(scenario)


def test_nobody_there() -> None:
    async def scenario(node: FakeNode, pool: NodePool) -> None:
        await node.stop()
        with pytest.raises(NodeUnreachable):
            await post(node, pool)

    run(scenario)


def test_where_a_url_leads() -> None:
    where = Origin(host="::1", port=443, tls=True, authority="[::1]", prefix="/base")
    assert origin_of("https://[::1]/base/") == where
