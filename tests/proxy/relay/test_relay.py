"""Requests go from a client through a running proxy to a node and back, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
import re

import msgspec
import pytest

from pdserve.config import AdmissionConfig, ProxyConfig
from pdserve.wire.discovery import Role
from pdserve.wire.terms import TICKET_HEADER, PrefillTarget
from tests.proxy.cluster import cluster, metric, node_info, proxy_config, ticket_of
from tests.proxy.fake_node import DONE, EVENTS, Exchange, FakeNode, stream_events


async def test_a_stream_arrives_byte_for_byte_as_an_event_stream() -> None:
    async with FakeNode(stream_events) as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.chat(stream=True) as response:
            body = await response.read()
            assert response.status == 200
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-length" not in response.headers
        assert body == b"".join(EVENTS) + DONE
        assert node.requests[0].path == "/v1/chat/completions"


async def test_each_event_is_relayed_when_it_comes() -> None:
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


async def test_an_answer_in_one_piece_keeps_status_and_safe_headers_only() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(
            418,
            b'{"id": 1}',
            cache_control="no-store",
            retry_after="3",
            x_accel_buffering="no",
            x_should_retry="false",
            set_cookie="a=b",
            x_pdserve_secret="no",
            server="n",
        )

    async with FakeNode(answer) as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.http.post("/v1/completions", json={"model": "m"}) as response:
            assert (response.status, await response.read()) == (418, b'{"id": 1}')
            assert response.headers["cache-control"] == "no-store"
            assert response.headers["retry-after"] == "3"
            names = {name.lower() for name in response.headers}
            assert names == {
                "cache-control", "content-length", "content-type", "date", "retry-after", "x-request-id",
                "x-accel-buffering", "x-should-retry",
            }  # fmt: skip
        assert node.requests[0].path == "/v1/completions"


async def test_internal_fields_and_headers_of_a_client_do_not_reach_a_node() -> None:
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
        assert ticket_of(node).terms.prompt.request_id == "req-7"


async def test_an_ordinary_body_reaches_the_node_byte_for_byte() -> None:
    async with FakeNode() as node, cluster(proxy_config(max_body_bytes=4 * 2**20)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        small = b'{ "model" : "m", "temperature": 0.70, "x": "\xc3\xa9" }'
        large = b'{"model": "m", "prompt": "' + b"a" * (3 * 2**20) + b'"}'
        for body in (small, large):
            async with running.http.post("/v1/completions", data=io.BytesIO(body)) as response:
                assert response.status == 200
            assert node.requests[-1].body == body


async def test_the_ticket_stands_for_the_client_without_its_name() -> None:
    """It is the owner of the key, or else the address."""
    keys = ("a-key-of-alice-0123", "a-key-of-bob-4567")

    async def clients(config: ProxyConfig, *given: str) -> list[bytes]:
        async with FakeNode() as node, cluster(config) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            for key in given:
                headers = {"authorization": f"Bearer {key}"}
                async with running.http.post("/v1/completions", data=b'{"model": "m"}', headers=headers) as response:
                    assert response.status == 200
            return [ticket_of(node, number).terms.client for number in range(len(given))]

    keyed = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=keys))
    alice, bob, again = await clients(keyed, *keys, keys[0])
    assert alice == again
    assert len({alice, bob, b""}) == 3
    first, second = await clients(proxy_config(), "any", "other")
    assert first == second
    assert first not in (alice, bob, b"")


async def test_the_ticket_names_the_node_the_prefill_nodes_and_the_time_that_is_left() -> None:
    async with FakeNode() as node, cluster(proxy_config(timeout_s=20.0)) as running:
        decode = node_info("d", Role.DECODE, node.url)
        prefill = [node_info(f"p{i}", Role.PREFILL) for i in range(2)]
        await running.add(decode, *prefill)
        for first, second in (prefill, reversed(prefill)):
            async with running.chat() as response:
                assert response.status == 200
            ticket = ticket_of(node, -1)
            assert (ticket.node, ticket.attempt) == (decode.boot_id, 0)
            assert 15.0 < ticket.terms.deadline_s < 20.001
            assert ticket.terms.prefill == tuple(
                PrefillTarget(info.name, info.control, info.boot_id) for info in (first, second)
            )


@pytest.mark.parametrize("given", ["", "x" * 129, "with space", "t\tb", "é"])
async def test_an_unfit_request_id_is_replaced(given: str) -> None:
    async with FakeNode() as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        for path in ("/v1/completions", "/nowhere"):
            async with running.http.post(path, data=b'{"model":"m"}', headers={"x-request-id": given}) as response:
                assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


async def test_connections_to_nodes_are_kept() -> None:
    async with FakeNode(stream_events) as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        for _ in range(5):
            async with running.chat(stream=True) as response:
                await response.read()
        assert len(node.requests) == 5
        assert len(node._connections) == 1


async def test_one_log_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pdserve_proxy.requests"):
        async with FakeNode(stream_events) as node, cluster() as running:
            await running.add(node_info("d0", Role.DECODE, node.url), node_info("p0", Role.PREFILL))
            headers = {"x-request-id": "req-1"}
            async with running.http.post("/v1/completions", json={"stream": True}, headers=headers) as response:
                await response.read()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "pdserve_proxy.requests"]
    size = len(b"".join(EVENTS) + DONE)
    assert re.fullmatch(
        r"request_id=req-1 route=/v1/completions decode=d0 prefill=p0 status=200 "
        rf"first_byte_s=0\.\d{{3}} total_s=0\.\d{{3}} bytes={size} outcome=ok",
        line,
    )


async def test_many_clients_at_once_get_their_own_streams() -> None:
    async def echo_model(exchange: Exchange) -> None:
        user = msgspec.json.decode(exchange.request.body)["user"]
        await exchange.begin_stream()
        for n in range(8):
            await exchange.chunk(b"data: %b %d\n\n" % (user.encode(), n))
        await exchange.finish()

    async with FakeNode(echo_model) as one, FakeNode(echo_model) as two, cluster() as running:
        await running.add(node_info("one", Role.MIXED, one.url), node_info("two", Role.MIXED, two.url))

        async def ask(user: str) -> None:
            async with running.chat(stream=True, user=user) as response:
                assert await response.read() == b"".join(b"data: %b %d\n\n" % (user.encode(), n) for n in range(8))

        await asyncio.gather(*(ask(f"u{i}") for i in range(60)))
        assert (len(one.requests), len(two.requests)) == (30, 30)
        assert await metric(running, "pdserve_proxy_requests_in_flight") == 0
