"""From a client through a running proxy to a node and back, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import re
from collections.abc import AsyncIterator

import msgspec
import pytest

from pdserve.wire.discovery import Role
from pdserve.wire.frame import Opener, Purpose
from pdserve.wire.ticket import TICKET_HEADER, PrefillTarget, Ticket
from tests.proxy.cluster import SECRET, Cluster, cluster, node_info, proxy_config, registered, run_async
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode

EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(5)]
DONE = b"data: [DONE]\n\n"


async def stream_events(exchange: Exchange) -> None:
    await exchange.begin_stream()
    for event in [*EVENTS, DONE]:
        await exchange.chunk(event)
    await exchange.finish()


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


def ticket_of(node: FakeNode, which: int = 0) -> Ticket:
    header = node.requests[which].headers[TICKET_HEADER]
    frame = base64.urlsafe_b64decode(header + "=" * (-len(header) % 4))
    return Opener(SECRET, Purpose.TICKET, Ticket).open(frame)


def error_of(body: bytes) -> dict[str, object]:
    error = msgspec.json.decode(body, type=dict[str, dict[str, object]])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def metric(at: Cluster, line: str) -> float:
    async with at.http.get("/metrics") as response:
        text = await response.text()
    found = re.search(rf"^{re.escape(line)} ([0-9.e+]+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_stream_arrives_byte_for_byte_as_an_event_stream() -> None:
    async def scenario() -> None:
        async with FakeNode(stream_events) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat(stream=True) as response:
                body = await response.read()
                assert response.status == 200
                assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
                assert "content-length" not in response.headers
            assert body == b"".join(EVENTS) + DONE
            assert node.requests[0].path == "/v1/chat/completions"

    run_async(scenario())


def test_each_event_is_relayed_when_it_comes() -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()

        async def one_then_wait(exchange: Exchange) -> None:
            await exchange.begin_stream()
            for event in EVENTS[:3]:
                await exchange.chunk(event)
                await go_on.wait()
                go_on.clear()
            await exchange.finish()

        async with FakeNode(one_then_wait) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.chat(stream=True) as response:
                for event in EVENTS[:3]:
                    assert await response.content.readany() == event
                    go_on.set()
                assert await response.content.readany() == b""

    run_async(scenario())


def test_an_answer_in_one_piece_keeps_status_and_safe_headers_only() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(
            418,
            b'{"id": 1}',
            cache_control="no-store",
            retry_after="3",
            set_cookie="a=b",
            x_pdserve_secret="no",
            server="n",
        )

    async def scenario() -> None:
        async with FakeNode(answer) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            async with running.http.post("/v1/completions", json={"model": "m"}) as response:
                assert (response.status, await response.read()) == (418, b'{"id": 1}')
                assert response.headers["cache-control"] == "no-store"
                assert response.headers["retry-after"] == "3"
                names = {name.lower() for name in response.headers}
                assert names == {
                    "cache-control", "content-length", "content-type", "date", "retry-after", "x-request-id"
                }  # fmt: skip
            assert node.requests[0].path == "/v1/completions"

    run_async(scenario())


def test_internal_fields_and_headers_of_a_client_do_not_reach_a_node() -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            headers = {
                TICKET_HEADER: "forged",
                "X-PDServe-Anything": "1",
                "authorization": "Bearer key",
                "cookie": "a=b",
                "x-forwarded-for": "1.2.3.4",
                "accept": "text/event-stream",
                "x-request-id": "req-7",
            }
            body = b'{"model":"m","kv_transfer_params":{"host":"evil"},"pdserve_route":"p","messages":[]}'
            async with running.http.post("/v1/chat/completions", data=body, headers=headers) as response:
                assert response.status == 200
                assert response.headers["x-request-id"] == "req-7"
            got = node.requests[0]
            assert got.body == b'{"model":"m","messages":[]}'
            assert set(got.headers) == {
                "host", "content-type", "content-length", "accept", "x-request-id", TICKET_HEADER
            }  # fmt: skip
            assert got.headers["x-request-id"] == "req-7"
            assert got.headers["accept"] == "text/event-stream"
            assert ticket_of(node).request_id == "req-7"

    run_async(scenario())


def test_an_ordinary_body_reaches_the_node_byte_for_byte() -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster(proxy_config(max_body_bytes=4 * 2**20)) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            small = b'{ "model" : "m", "temperature": 0.70, "x": "\xc3\xa9" }'
            large = b'{"model": "m", "prompt": "' + b"a" * (3 * 2**20) + b'"}'
            for body in (small, large):
                async with running.http.post("/v1/completions", data=io.BytesIO(body)) as response:
                    assert response.status == 200
                assert node.requests[-1].body == body

    run_async(scenario())


def test_the_ticket_names_the_node_the_prefill_nodes_and_the_time_that_is_left() -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster(proxy_config(timeout_s=20.0)) as running:
            decode = node_info("d", Role.DECODE, node.url)
            prefill = [node_info(f"p{i}", Role.PREFILL) for i in range(2)]
            await running.add(decode, *prefill)
            for first, second in (prefill, reversed(prefill)):
                async with running.chat() as response:
                    assert response.status == 200
                ticket = ticket_of(node, -1)
                assert (ticket.node, ticket.attempt) == (decode.boot_id, 0)
                assert 15.0 < ticket.deadline_s <= 20.0
                assert ticket.prefill == tuple(
                    PrefillTarget(info.name, info.control, info.boot_id) for info in (first, second)
                )

    run_async(scenario())


@pytest.mark.parametrize("given", ["", "x" * 129, "with space", "t\tb", "é"])
def test_an_unfit_request_id_is_replaced(given: str) -> None:
    async def scenario() -> None:
        async with FakeNode() as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            for path in ("/v1/completions", "/nowhere"):
                async with running.http.post(path, data=b'{"model":"m"}', headers={"x-request-id": given}) as response:
                    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])

    run_async(scenario())


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


def test_connections_to_nodes_are_kept() -> None:
    async def scenario() -> None:
        async with FakeNode(stream_events) as node, cluster() as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            for _ in range(5):
                async with running.chat(stream=True) as response:
                    await response.read()
            assert len(node.requests) == 5
            assert len(node._connections) == 1

    run_async(scenario())


def test_one_log_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with FakeNode(stream_events) as node, cluster() as running:
            await running.add(node_info("d0", Role.DECODE, node.url), node_info("p0", Role.PREFILL))
            headers = {"x-request-id": "req-1"}
            async with running.http.post("/v1/completions", json={"stream": True}, headers=headers) as response:
                await response.read()

    with caplog.at_level(logging.INFO, logger="pdserve_proxy.requests"):
        run_async(scenario())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "pdserve_proxy.requests"]
    size = len(b"".join(EVENTS) + DONE)
    assert re.fullmatch(
        r"request_id=req-1 route=/v1/completions decode=d0 prefill=p0 status=200 "
        rf"first_byte_s=0\.\d{{3}} total_s=0\.\d{{3}} bytes={size} outcome=ok",
        line,
    )


def test_many_clients_at_once_get_their_own_streams() -> None:
    async def echo_model(exchange: Exchange) -> None:
        user = msgspec.json.decode(exchange.request.body)["user"]
        await exchange.begin_stream()
        for n in range(8):
            await exchange.chunk(b"data: %b %d\n\n" % (user.encode(), n))
        await exchange.finish()

    async def scenario() -> None:
        async with FakeNode(echo_model) as one, FakeNode(echo_model) as two, cluster() as running:
            await running.add(node_info("one", Role.MIXED, one.url), node_info("two", Role.MIXED, two.url))

            async def ask(user: str) -> None:
                async with running.chat(stream=True, user=user) as response:
                    assert await response.read() == b"".join(b"data: %b %d\n\n" % (user.encode(), n) for n in range(8))

            await asyncio.gather(*(ask(f"u{i}") for i in range(60)))
            assert (len(one.requests), len(two.requests)) == (30, 30)
            assert await metric(running, "pdserve_proxy_requests_in_flight") == 0

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
            async with asyncio.timeout(5):
                while await metric(running, client_gone) < 1:
                    pass
            assert node.requests == []

    run_async(scenario())
