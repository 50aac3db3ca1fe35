"""Clients get the right error when a node or the network fails, a deadline passes, or they leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from pdserve.http import request as http_request
from pdserve.http.guard import HALF_CLOSED_S
from pdserve.http.tls import Trust
from pdserve.wire.discovery import NodeInfo, Register, Role
from pdserve.wire.ids import new_id
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.relay import attempt_rule, complete_answer
from pdserve_proxy.relay.dispatch import NodeRequest, TicketSigner
from pdserve_proxy.relay.relay import Relay, StreamedResponse
from pdserve_proxy.requests.request_body import read_body
from pdserve_proxy.routing.attempts import Attempts
from tests.proxy.cluster import (
    SECRET,
    Cluster,
    cluster,
    error_of,
    eventually,
    metric,
    node_info,
    proxy_config,
    registered,
    ticket_of,
)
from tests.proxy.fake_node import DONE, EVENTS, Behaviour, Exchange, FakeNode, Received, answer_ok, stream_events
from tests.proxy.shared_proxy import SharedProxy
from tests.terms import made_terms


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
async def test_a_client_that_leaves_closes_the_upstream_at_once(
    proxy: SharedProxy, stream: bool, headers_sent: bool
) -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def begin_and_watch(exchange: Exchange) -> None:
        if headers_sent:
            await exchange.begin_stream()
            await exchange.chunk(EVENTS[0])
        entered.set()
        await exchange.gone()
        left.set()

    async with FakeNode(begin_and_watch) as node, proxy.cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        client = asyncio.create_task(_post_and_wait(running, stream))
        async with asyncio.timeout(5):
            await entered.wait()
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        # A stream shows this with its next chunk, and where chunks pause, as here, the client is asked.
        async with asyncio.timeout(1 if not headers_sent else 1 + 2 * HALF_CLOSED_S):
            await left.wait()
        assert await metric(running, "pdserve_proxy_requests_in_flight") == 0
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="client_gone"}') == 1


async def _post_and_wait(running: Cluster, stream: bool) -> None:
    async with running.chat(stream=stream) as response:
        await response.read()


async def test_no_node_no_pair_and_no_model(proxy: SharedProxy) -> None:
    async with FakeNode() as node, proxy.cluster() as running:

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
async def test_bad_bodies_are_refused_without_asking_a_node(body: bytes, status: int) -> None:
    async with FakeNode() as node, cluster(proxy_config(max_body_bytes=4096)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.http.post("/v1/chat/completions", data=body) as response:
            assert response.status == status
            assert response.headers["content-type"] == "application/json"
            assert error_of(await response.read())["type"] == "invalid_request_error"
        assert node.requests == []


async def test_a_body_without_a_length_is_bounded_too() -> None:
    async with cluster(proxy_config(max_body_bytes=4096)) as running:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b" " * 1024

        async with running.http.post("/v1/completions", data=pieces()) as response:
            assert response.status == 413


@pytest.mark.parametrize("failing", [die_before_headers, die_before_the_first_event, refuse_busy, die_mid_answer])
async def test_a_node_that_fails_before_its_first_byte_is_replaced_by_another(
    failing: Behaviour,
) -> None:
    async with FakeNode(failing) as bad, FakeNode(stream_events) as good, cluster() as running:
        await running.add(node_info("bad", Role.MIXED, bad.url), node_info("good", Role.MIXED, good.url))
        async with running.chat(stream=True) as response:
            assert await response.read() == b"".join(EVENTS) + DONE
        assert (ticket_of(bad).attempt, ticket_of(good).attempt) == (0, 1)
        assert await metric(running, "pdserve_proxy_upstream_retries_total") == 1


async def refuse_ticket(exchange: Exchange) -> None:
    await exchange.answer(401, b'{"error": {"message": "another node\'s"}}')


async def stream_half(exchange: Exchange) -> None:
    """Sends the first event, and never the rest."""
    await exchange.begin_stream()
    await exchange.chunk(EVENTS[0])
    await exchange.gone()


@asynccontextmanager
async def nodes(running: Cluster, *behaviours: Behaviour) -> AsyncIterator[list[Received]]:
    """Runs nodes, the first of which to be asked behaves as the first of ``behaviours``, and yields their requests."""
    asked: list[Received] = []

    async def behave(exchange: Exchange) -> None:
        asked.append(exchange.request)
        await behaviours[len(asked) - 1](exchange)

    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(FakeNode(behave)) for _ in behaviours]
        await running.add(*[node_info(f"n{number}", Role.MIXED, node.url) for number, node in enumerate(made)])
        yield asked
        assert all(len(node.requests) <= 1 for node in made)


@pytest.mark.parametrize(
    "refusing", [[refuse_busy] * 5, [refuse_ticket] * 2, [refuse_busy, die_before_headers, refuse_busy]]
)
async def test_a_request_that_nodes_do_not_take_goes_to_the_one_that_does(
    proxy: SharedProxy, refusing: list[Behaviour]
) -> None:
    async with proxy.cluster() as running, nodes(running, *refusing, stream_events) as asked:
        async with running.chat(stream=True) as response:
            assert await response.read() == b"".join(EVENTS) + DONE
        assert len(asked) == len(refusing) + 1
        assert await metric(running, "pdserve_proxy_upstream_retries_total") == len(refusing)


async def test_several_nodes_that_cannot_be_reached_are_replaced_too(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, FakeNode() as good, AsyncExitStack() as gone:
        for number in range(3):
            async with FakeNode() as node:
                info = node_info(f"gone{number}", Role.MIXED, node.url)
            await gone.enter_async_context(registered(info, running.addresses.control, heartbeat_ms=60_000))
        await running.add(node_info("good", Role.MIXED, good.url))
        async with running.chat() as response:
            assert response.status == 200
        assert len(good.requests) == 1


async def test_a_request_that_two_nodes_were_lost_with_is_not_given_to_a_third(proxy: SharedProxy) -> None:
    behaviours = [die_before_headers, refuse_busy, die_before_headers, answer_ok]
    async with proxy.cluster() as running, nodes(running, *behaviours) as asked:
        async with running.chat() as response:
            assert response.status == 502
            assert error_of(await response.read())["code"] == "upstream_lost"
        assert len(asked) == 3


async def test_a_request_that_nodes_die_of_is_given_to_two_also_over_kept_connections(proxy: SharedProxy) -> None:
    asked: list[FakeNode] = []

    def behaviour(made: list[FakeNode], number: int) -> Behaviour:
        async def die_of_poison(exchange: Exchange) -> None:
            if b"poison" not in exchange.request.body:
                await answer_ok(exchange)
                return
            asked.append(made[number])
            made[number]._server.close()  # A dead process accepts no new connection.
            exchange.die()

        return die_of_poison

    async with proxy.cluster() as running, AsyncExitStack() as stack:
        made: list[FakeNode] = []
        for number in range(4):
            made.append(await stack.enter_async_context(FakeNode(behaviour(made, number))))
            await running.add(node_info(f"n{number}", Role.MIXED, made[number].url))

        async def ask_all() -> bool:
            async with running.chat() as response:
                assert response.status == 200
            return all(node.requests for node in made)

        await eventually(ask_all, "there is a kept connection to every node")
        async with running.chat(user="poison") as response:
            assert response.status == 502
            assert error_of(await response.read())["code"] == "upstream_lost"
        assert len(asked) == 2


async def test_not_more_than_so_many_nodes_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_rule, "MAX_ATTEMPTS", 3)

    async with cluster() as running, nodes(running, *[refuse_busy] * 4, answer_ok) as asked:
        async with running.chat() as response:
            assert response.status == 503
            assert await response.read() == b'{"error": {"message": "busy"}}'
        assert len(asked) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_the_time_to_the_first_byte_is_that_of_the_answer_the_client_gets(
    proxy: SharedProxy, stream: bool
) -> None:
    later_s = 0.3

    async def answer_later(exchange: Exchange) -> None:
        await asyncio.sleep(later_s)
        await (stream_events if stream else answer_ok)(exchange)

    name = "pdserve_proxy_time_to_first_byte_seconds"
    async with proxy.cluster() as running, nodes(running, refuse_busy, die_mid_answer, answer_later) as asked:
        async with running.chat(stream=stream) as response:
            assert response.status == 200
            await response.read()
        assert len(asked) == 3
        assert await metric(running, f"{name}_count") == 1
        assert await metric(running, f"{name}_sum") >= later_s
    async with proxy.cluster() as running, nodes(running, refuse_busy):
        async with running.chat(stream=stream) as response:
            assert response.status == 503
        assert await metric(running, f"{name}_count") == 0


@pytest.mark.parametrize("failing", [refuse_busy, die_mid_answer])
async def test_after_a_retry_the_load_is_where_the_request_is(failing: Behaviour) -> None:
    behaviours = [failing, stream_half]

    async def behave(exchange: Exchange) -> None:
        await behaviours.pop(0)(exchange)

    async with FakeNode(behave) as one, FakeNode(behave) as other:
        attempts, config = Attempts(), proxy_config()
        registry = Registry(1.0, 3, watcher=attempts)
        decode = [node_info("one", Role.DECODE, one.url), node_info("other", Role.DECODE, other.url)]
        prefill = node_info("p", Role.PREFILL)
        for info in (*decode, prefill):
            registry.handle(Register(info), 0.0)
        tickets, counts = TicketSigner(SECRET, new_id()), RequestCounts()

        def load(info: NodeInfo) -> int:
            return attempts.load(info.boot_id)

        task = asyncio.current_task()
        assert task is not None
        async with Relay(config, registry, attempts, tickets, counts, Trust()) as made:
            with made.begin(task, "r", "/v1/completions") as exchange:
                call = NodeRequest("/v1/completions", read_body(b'{"model": "m", "stream": true}'), None, made_terms())
                assert isinstance(await made.forward(exchange, call), StreamedResponse)
                # The prompt is computed, so the prefill node is no longer needed.
                assert sorted(load(info) for info in decode) == [0, 1]
                assert load(prefill) == 0
            assert [load(info) for info in decode] == [0, 0]


async def test_a_node_that_refuses_connections_is_left_out_until_its_next_heartbeat(proxy: SharedProxy) -> None:
    async with FakeNode() as bad, FakeNode() as good, proxy.cluster() as running:
        await running.add(node_info("good", Role.MIXED, good.url))
        await bad.stop()
        async with registered(node_info("bad", Role.MIXED, bad.url), running.addresses.control):
            for _ in range(4):
                async with running.chat() as response:
                    assert response.status == 200
        assert len(good.requests) == 4


@pytest.mark.parametrize(
    ("behaviour", "status", "code", "retry_after"),
    [(die_before_headers, 502, "upstream_lost", None), (die_mid_answer, 502, "upstream_lost", None)],
)
async def test_a_lost_node_without_an_alternative(
    behaviour: Behaviour, status: int, code: str, retry_after: str | None
) -> None:
    async with FakeNode(behaviour) as node, cluster(proxy_config(resume_wait_s=0.1)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat() as response:
            assert (response.status, response.headers.get("retry-after")) == (status, retry_after)
            assert error_of(await response.read())["code"] == code
        assert len(node.requests) == 1


async def test_an_unreachable_node_without_an_alternative(proxy: SharedProxy) -> None:
    async with FakeNode() as node, proxy.cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        await node.stop()
        async with running.chat() as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert error_of(await response.read())["type"] == "service_unavailable"


async def test_a_busy_node_without_an_alternative_speaks_for_itself(proxy: SharedProxy) -> None:
    async with FakeNode(refuse_busy) as node, proxy.cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat() as response:
            assert (response.status, response.headers["retry-after"]) == (503, "7")
            assert await response.read() == b'{"error": {"message": "busy"}}'


@pytest.mark.parametrize("status", [204, 301, 304, 401, 500, 600, 999])
async def test_what_a_node_should_not_say_to_a_client_becomes_a_502(proxy: SharedProxy, status: int) -> None:
    async def speak(exchange: Exchange) -> None:
        kind = "application/json" if status == 401 else "text/plain"
        await exchange.answer(status, b"Internal Server Error", content_type=kind, location="http://elsewhere/")

    async with FakeNode(speak) as node, proxy.cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat() as response:
            assert response.status == 502
            assert error_of(await response.read())["type"] == "server_error"


@pytest.mark.parametrize("chunked", [True, False])
async def test_an_answer_that_does_not_end_is_given_up(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete_answer, "MAX_ANSWER_BYTES", 2**20)

    left = asyncio.Event()

    async def go_on_and_on(exchange: Exchange) -> None:
        try:
            if chunked:
                await exchange.begin_stream(content_type="application/json")
            else:
                await exchange.answer(200, b"{", content_length=str(2**40))
            while True:
                await exchange.chunk(b" " * 2**14)
        finally:
            left.set()

    async with FakeNode(go_on_and_on) as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat() as response:
            assert response.status == 502
            assert error_of(await response.read())["code"] == "upstream_invalid"
        async with asyncio.timeout(5):
            await left.wait()


async def test_a_stream_whose_node_dies_ends_with_an_error_event_and_without_done(proxy: SharedProxy) -> None:
    async with FakeNode(die_mid_stream) as node, FakeNode() as other, proxy.cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat(stream=True) as response:
            assert response.status == 200
            body = await response.read()
        produced = EVENTS[0] + EVENTS[1]
        assert body.startswith(produced + b"event: error\ndata: ")
        assert body.endswith(b"\n\n")
        error = error_of(body[len(produced) + len(b"event: error\ndata: ") :])
        assert (error["type"], error["code"]) == ("server_error", "upstream_lost")
        assert other.requests == []
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="upstream_lost"}') == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_deadline_ends_a_request_that_waits(stream: bool) -> None:
    async with FakeNode(hang) as node, cluster(proxy_config(timeout_s=0.2)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat(stream=stream) as response:
            assert response.status == 504
            assert response.headers["x-should-retry"] == "false"
            assert error_of(await response.read())["type"] == "timeout_error"


async def test_the_deadline_ends_a_stream_with_an_error_event_and_frees_its_node() -> None:
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
        assert error_of(body.removeprefix(EVENTS[0] + b"event: error\ndata: "))["code"] == "deadline_exceeded"
        async with asyncio.timeout(1):
            await left.wait()


async def test_a_stream_that_falls_silent_counts_as_lost() -> None:
    async def begin_and_hang(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENTS[0])
        await exchange.gone()

    async with FakeNode(begin_and_hang) as node, cluster(proxy_config(idle_timeout_s=0.2)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat(stream=True) as response:
            body = await response.read()
        assert error_of(body.removeprefix(EVENTS[0] + b"event: error\ndata: "))["code"] == "upstream_lost"


async def test_an_upload_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_request, "UPLOAD_TIMEOUT_S", 0.1)

    async with FakeNode() as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        host, _, port = running.addresses.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"did not come within" in await reader.readuntil(b"}}")
        writer.close()
        assert node.requests == []


async def test_a_client_that_hangs_up_during_its_upload_leaves_nothing_behind(proxy: SharedProxy) -> None:
    async with FakeNode() as node, proxy.cluster() as running:
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
