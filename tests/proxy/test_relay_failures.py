"""What clients get when a node, the network, a deadline or they themselves fail, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.wire.discovery import Role
from pdserve_proxy import client_request
from tests.proxy.cluster import (
    Cluster,
    cluster,
    error_of,
    eventually,
    metric,
    node_info,
    proxy_config,
    registered,
    run_async,
    ticket_of,
)
from tests.proxy.fake_node import DONE, EVENTS, Behaviour, Exchange, FakeNode, stream_events


async def hang(exchange: Exchange) -> None:
    await exchange.gone()


async def refuse_busy(exchange: Exchange) -> None:
    await exchange.answer(503, b'{"error": {"message": "busy"}}', retry_after="7")


async def die_before_headers(exchange: Exchange) -> None:
    exchange.die()


async def die_before_the_first_event(exchange: Exchange) -> None:
    await exchange.begin_stream()
    exchange.die()


async def die_mid_answer(exchange: Exchange) -> None:
    await exchange.answer(200, b'{"half', content_length="100")
    exchange.die()


async def die_mid_stream(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(EVENTS[0])
    await exchange.chunk(EVENTS[1] + b'data: {"half')
    exchange.die()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("headers_sent", [True, False])
def test_a_client_that_leaves_closes_the_upstream_at_once(stream: bool, headers_sent: bool) -> None:
    async def scenario() -> None:
        entered, left = asyncio.Event(), asyncio.Event()

        async def begin_and_watch(exchange: Exchange) -> None:
            if headers_sent:
                await exchange.begin_stream()
                await exchange.chunk(EVENTS[0])
            entered.set()
            await exchange.gone()
            left.set()

        async with FakeNode(begin_and_watch) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            client = asyncio.create_task(_post_and_wait(running, stream))
            async with asyncio.timeout(5):
                await entered.wait()
            client.cancel()
            await asyncio.gather(client, return_exceptions=True)
            async with asyncio.timeout(1):
                await left.wait()
            assert await metric(running, "pdserve_proxy_requests_in_flight") == 0
            assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="client_gone"}') == 1

    run_async(scenario())


async def _post_and_wait(running: Cluster, stream: bool) -> None:
    async with running.chat(stream=stream) as response:
        await response.read()


def test_no_node_no_pair_and_no_model() -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster() as running:

            async def refused(model: str = "m") -> tuple[int, str | None, object]:
                async with running.http.post("/v1/completions", json={"model": model}) as response:
                    error = error_of(await response.read())
                    return response.status, response.headers.get("retry-after"), error["code"]

            assert await refused() == (503, "1", "no_nodes")
            await running.add(node_info("d", Role.DECODE, node.url))
            assert await refused() == (503, "1", "no_route")
            assert await refused("gpt-9") == (404, None, "model_not_found")
            await running.add(node_info("p", Role.PREFILL, fingerprint="another"))
            assert await refused() == (503, "1", "no_route")
            await running.add(node_info("q", Role.PREFILL))
            async with running.chat() as response:
                assert response.status == 200
            assert len(node.requests) == 1

    run_async(scenario())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{broken", 400),
        (b'["a list"]', 400),
        (b'{"model": 7}', 400),
        (b'{"model": "' + b"a" * 5000 + b'"}', 413),
    ],
)
def test_bad_bodies_are_refused_without_asking_a_node(body: bytes, status: int) -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster(proxy_config(max_body_bytes=4096)) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.http.post("/v1/chat/completions", data=body) as response:
                assert response.status == status
                assert response.headers["content-type"] == "application/json"
                assert error_of(await response.read())["type"] == "invalid_request_error"
            assert node.requests == []

    run_async(scenario())


def test_a_body_without_a_length_is_bounded_too() -> None:
    async def scenario() -> None:
        async with cluster(proxy_config(max_body_bytes=4096)) as running:

            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(8):
                    yield b" " * 1024

            async with running.http.post("/v1/completions", data=pieces()) as response:
                assert response.status == 413

    run_async(scenario())


@pytest.mark.parametrize("failing", [die_before_headers, die_before_the_first_event, refuse_busy, die_mid_answer])
def test_a_node_that_fails_before_its_first_byte_is_replaced_by_another(failing: Behaviour) -> None:
    async def scenario() -> None:
        async with FakeNode(failing) as bad, FakeNode(stream_events) as good, cluster() as running:
            await running.add(node_info("bad", Role.MIXED, bad.url), node_info("good", Role.MIXED, good.url))
            async with running.chat(stream=True) as response:
                assert await response.read() == b"".join(EVENTS) + DONE
            assert (ticket_of(bad).attempt, ticket_of(good).attempt) == (0, 1)
            assert await metric(running, "pdserve_proxy_upstream_retries_total") == 1

    run_async(scenario())


def test_a_node_that_refuses_connections_is_left_out_until_its_next_heartbeat() -> None:
    async def scenario() -> None:
        async with FakeNode() as bad, FakeNode() as good, cluster() as running:
            await running.add(node_info("good", Role.MIXED, good.url))
            await bad.stop()
            async with registered(node_info("bad", Role.MIXED, bad.url), running.addresses.control):
                for _ in range(4):
                    async with running.chat() as response:
                        assert response.status == 200
            assert len(good.requests) == 4

    run_async(scenario())


@pytest.mark.parametrize(
    ("behaviour", "status", "code", "retry_after"),
    [(die_before_headers, 502, "upstream_lost", None), (die_mid_answer, 502, "upstream_lost", None)],
)
def test_a_lost_node_without_an_alternative(
    behaviour: Behaviour, status: int, code: str, retry_after: str | None
) -> None:
    async def scenario() -> None:
        async with FakeNode(behaviour) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat() as response:
                assert (response.status, response.headers.get("retry-after")) == (status, retry_after)
                assert error_of(await response.read())["code"] == code
            assert len(node.requests) == 1

    run_async(scenario())


def test_an_unreachable_node_without_an_alternative() -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            await node.stop()
            async with running.chat() as response:
                assert (response.status, response.headers["retry-after"]) == (503, "1")
                assert error_of(await response.read())["type"] == "service_unavailable"

    run_async(scenario())


def test_a_busy_node_without_an_alternative_speaks_for_itself() -> None:
    async def scenario() -> None:
        async with FakeNode(refuse_busy) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat() as response:
                assert (response.status, response.headers["retry-after"]) == (503, "7")
                assert await response.read() == b'{"error": {"message": "busy"}}'

    run_async(scenario())


@pytest.mark.parametrize("status", [301, 401, 500])
def test_what_a_node_should_not_say_to_a_client_becomes_a_502(status: int) -> None:
    async def speak(exchange: Exchange) -> None:
        kind = "application/json" if status == 401 else "text/plain"
        await exchange.answer(status, b"Internal Server Error", content_type=kind, location="http://elsewhere/")

    async def scenario() -> None:
        async with FakeNode(speak) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat() as response:
                assert response.status == 502
                assert error_of(await response.read())["type"] == "server_error"

    run_async(scenario())


def test_a_stream_whose_node_dies_ends_with_an_error_event_and_without_done() -> None:
    async def scenario() -> None:
        async with FakeNode(die_mid_stream) as node, FakeNode() as other, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat(stream=True) as response:
                assert response.status == 200
                body = await response.read()
            produced = EVENTS[0] + EVENTS[1]
            assert body.startswith(produced + b"data: ")
            assert body.endswith(b"\n\n")
            error = error_of(body[len(produced) + len(b"data: ") :])
            assert (error["type"], error["code"]) == ("server_error", "upstream_lost")
            assert other.requests == []
            assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="upstream_lost"}') == 1

    run_async(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_the_deadline_ends_a_request_that_waits(stream: bool) -> None:
    async def scenario() -> None:
        async with FakeNode(hang) as node, cluster(proxy_config(timeout_s=0.2)) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat(stream=stream) as response:
                assert response.status == 504
                assert error_of(await response.read())["type"] == "timeout_error"

    run_async(scenario())


def test_the_deadline_ends_a_stream_with_an_error_event_and_frees_its_node() -> None:
    async def scenario() -> None:
        left = asyncio.Event()

        async def begin_and_hang(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.chunk(EVENTS[0])
            await exchange.gone()
            left.set()

        async with FakeNode(begin_and_hang) as node, cluster(proxy_config(timeout_s=0.3)) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat(stream=True) as response:
                body = await response.read()
            assert error_of(body.removeprefix(EVENTS[0] + b"data: "))["code"] == "deadline_exceeded"
            async with asyncio.timeout(1):
                await left.wait()

    run_async(scenario())


def test_a_stream_that_falls_silent_counts_as_lost() -> None:
    async def begin_and_hang(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENTS[0])
        await exchange.gone()

    async def scenario() -> None:
        async with FakeNode(begin_and_hang) as node, cluster(proxy_config(idle_timeout_s=0.2)) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat(stream=True) as response:
                body = await response.read()
            assert error_of(body.removeprefix(EVENTS[0] + b"data: "))["code"] == "upstream_lost"

    run_async(scenario())


def test_an_upload_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_request, "UPLOAD_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with FakeNode() as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            host, _, port = running.addresses.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 504 ")
            assert b"did not come within" in await reader.readuntil(b"}}")
            writer.close()
            assert node.requests == []

    run_async(scenario())


def test_a_client_that_hangs_up_during_its_upload_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            host, _, port = running.addresses.url.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            client_gone = 'pdserve_proxy_outcomes_total{outcome="client_gone"}'

            async def noticed() -> bool:
                return await metric(running, client_gone) == 1

            await eventually(noticed, "the proxy notices")
            assert node.requests == []

    run_async(scenario())
