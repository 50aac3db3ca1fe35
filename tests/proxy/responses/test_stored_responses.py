"""A proxy with ``--store``: what clients get of kept responses, and what nodes get of conversations."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from io import BytesIO
from typing import Any

import pytest

from pdserve.config import AdmissionConfig, ProxyConfig, StoreConfig, Switch, WorkersConfig
from pdserve.control.journal import DONE_ENTRY, entry
from tests.proxy.cluster import Cluster, cluster, error_of, eventually, metric, proxy_config
from tests.proxy.fake_node import Behaviour, Exchange
from tests.proxy.journaling_nodes import Nodes, nodes, ticket_in

ROUTE = "/v1/responses"
LARGE = 12 * 2**20
"""More than the kernel's buffers on the way can hold."""
KEYS = ("a-key-of-sixteen-chars", "b-key-of-sixteen-chars")


def config(**store: Any) -> ProxyConfig:
    return dataclasses.replace(proxy_config(), store=StoreConfig(store=Switch.ON, **store))


def response_of(exchange: Exchange, text: str = "Yes", status: str = "completed") -> dict[str, Any]:
    """Returns a response with the id that the ticket gives it."""
    answer, storing = ticket_in(exchange.request).terms.answer, ticket_in(exchange.request).terms.storing
    assert answer is not None
    output = [{"id": f"msg_{answer.id.hex()}", "type": "message", "role": "assistant", "content": text}]
    kept = storing is not None and storing.stored
    return {"id": f"resp_{answer.id.hex()}", "status": status, "store": kept, "output": output}


async def whole(exchange: Exchange) -> None:
    await exchange.answer(200, json.dumps(response_of(exchange)).encode())


def events_of(exchange: Exchange, last: str) -> list[bytes]:
    final = json.dumps({"type": last, "response": response_of(exchange, status=last.partition(".")[2])}).encode()
    return [
        entry(0, [5]) + b'event: response.created\ndata: {"response": {"id": "x", "output": []}}\n\n',
        entry(0, ()) + b'event: piece\ndata: {"delta": "event: response.completed"}\n\n',
        entry(0, [6]) + b'event: piece\ndata: {"delta": "Yes"}\n\n',
        DONE_ENTRY + b"event: %b\ndata: %b\n\n" % (last.encode(), final),
    ]


def streams(start: int = 0, end: int | None = None, last: str = "response.completed") -> Behaviour:
    """Returns the behaviour of a node that streams the events from ``start`` to ``end``, and dies before the last."""

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for event in events_of(exchange, last)[start:end]:
            await exchange.chunk(event)
        if end is None:
            await exchange.finish()
        else:
            exchange.die()

    return stream


def history_in(asked: Nodes, which: int) -> list[dict[str, Any]]:
    """Returns the items that a node got behind the client's body."""
    request = asked.asked[which]
    storing = ticket_in(request).terms.storing
    assert storing is not None
    if not storing.history_bytes:
        return []
    found: list[dict[str, Any]] = json.loads(request.body[-storing.history_bytes :])
    return found


async def ask(running: Cluster, **body: Any) -> tuple[int, dict[str, Any]]:
    async with running.http.post(ROUTE, json={"model": "m", "input": "Hi", **body}) as response:
        return response.status, json.loads(await response.read())


async def stream_of(running: Cluster, **body: Any) -> bytes:
    async with running.http.post(ROUTE, json={"model": "m", "input": "Hi", "stream": True, **body}) as response:
        assert response.status == 200
        return await response.read()


async def call(running: Cluster, path: str, method: str = "GET", key: str = "") -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with running.http.request(method, f"{ROUTE}/{path}", headers=headers) as response:
        return response.status, await response.read()


@asynccontextmanager
async def serving(*behaviours: Behaviour, settings: ProxyConfig | None = None) -> AsyncIterator[tuple[Cluster, Nodes]]:
    async with cluster(settings or config()) as running, nodes(running, *behaviours, count=1) as asked:
        yield running, asked


async def test_a_whole_response_is_kept_as_it_was_sent_until_it_is_deleted() -> None:
    async with serving(whole) as (running, _):
        status, sent = await ask(running)
        assert (status, sent["store"]) == (200, True)
        status, found = await call(running, sent["id"])
        assert (status, json.loads(found)) == (200, sent)
        assert await metric(running, "pdserve_proxy_stored_responses") == 1
        status, deleted = await call(running, sent["id"], "DELETE")
        assert (status, json.loads(deleted)) == (200, {"id": sent["id"], "object": "response", "deleted": True})
        for method in ("GET", "DELETE"):
            status, refused = await call(running, sent["id"], method)
            assert (status, error_of(refused)["code"]) == (404, "response_not_found")
        assert await metric(running, "pdserve_proxy_store_bytes") == 0


@pytest.mark.parametrize("last", ["response.completed", "response.incomplete"])
async def test_a_streamed_response_is_kept_as_its_last_event_has_it(last: str) -> None:
    async with serving(streams(last=last)) as (running, _):
        sent = await stream_of(running)
        assert sent.count(b"event: ") == 4 + 1  # one of them within a text
        final = json.loads(sent.rpartition(b"data: ")[2])["response"]
        status, found = await call(running, final["id"])
        assert (status, json.loads(found)) == (200, final)


@pytest.mark.parametrize("end", [1, 2, 3])
async def test_a_stream_that_goes_on_at_another_node_is_kept_too(end: int) -> None:
    async with cluster(config()) as running, nodes(running, streams(0, end), streams(end)) as asked:
        sent = await stream_of(running)
        assert [ticket.terms.storing for ticket in asked.tickets] == [asked.tickets[0].terms.storing] * 2
        final = json.loads(sent.rpartition(b"data: ")[2])["response"]
        assert json.loads((await call(running, final["id"]))[1]) == final


async def test_a_stream_that_breaks_off_leaves_nothing() -> None:
    settings = dataclasses.replace(config(), relay=proxy_config(resume_wait_s=0.1).relay)
    async with serving(streams(0, 3), streams(last="response.failed"), settings=settings) as (running, _):
        assert b"event: error" in await stream_of(running)
        assert b"event: response.failed" in await stream_of(running)
        assert await metric(running, "pdserve_proxy_stored_responses") == 0
        assert await metric(running, "pdserve_proxy_store_bytes") == 0


async def test_a_client_that_leaves_leaves_nothing() -> None:
    async def hang(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(events_of(exchange, "response.completed")[0])
        await exchange.gone()

    async with serving(hang) as (running, _):
        async with running.http.post(ROUTE, json={"model": "m", "input": "Hi", "stream": True}) as response:
            await response.content.readany()
            assert await metric(running, "pdserve_proxy_store_bytes") > 0
            response.close()

        async def empty() -> bool:
            return await metric(running, "pdserve_proxy_store_bytes") == 0

        await eventually(empty, "the store is empty")


async def test_a_conversation_goes_on_with_all_its_items_in_order() -> None:
    async with serving(whole, streams(), whole, whole) as (running, asked):
        _, first = await ask(running, input="One", instructions="Be brief.")
        stream = await stream_of(running, input=[{"role": "user", "content": "Two"}], previous_response_id=first["id"])
        second = json.loads(stream.rpartition(b"data: ")[2])["response"]
        await ask(running, input="Three", previous_response_id=second["id"])
        await ask(running, input="Three", previous_response_id=second["id"], store=False)
        assert history_in(asked, 0) == []
        texts = [
            [item["content"] if isinstance(item["content"], str) else item["content"][0]["text"] for item in items]
            for items in (history_in(asked, 1), history_in(asked, 2), history_in(asked, 3))
        ]
        assert texts == [["One", "Yes"], ["One", "Yes", "Two", "Yes"], ["One", "Yes", "Two", "Yes"]]
        kept = [ticket.terms.storing.stored for ticket in asked.tickets if ticket.terms.storing]
        assert kept == [True, True, True, False]
        listed = json.loads((await call(running, f"{second['id']}/input_items?order=asc"))[1])
        assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
        one = json.loads((await call(running, f"{second['id']}/input_items?limit=1"))[1])
        assert (one["data"], one["has_more"]) == (listed["data"][-1:], True)


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with serving(whole) as (running, asked):
        _, sent = await ask(running, store=False)
        assert sent["store"] is False
        assert (await call(running, sent["id"]))[0] == 404
        assert asked.tickets[0].terms.storing is not None


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"previous_response_id": "resp_none", "store": False}, 404, "previous_response_id"),
        ({"previous_response_id": 7}, 400, "previous_response_id"),
        ({"previous_response_id": "other"}, 400, "previous_response_id"),
        ({"store": "yes"}, 400, "store"),
        ({"input": 7}, 400, "input"),
    ],
)
async def test_wrong_requests_are_refused_by_name(body: dict[str, Any], status: int, param: str) -> None:
    async with serving(whole) as (running, asked):
        got, refused = await ask(running, **body)
        assert (got, refused["error"]["param"]) == (status, param)
        assert not asked.asked
        assert await metric(running, "pdserve_proxy_store_bytes") == 0


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true", "stream"),
        ("?starting_after=3", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=\u0663", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=none", "after"),
    ],
)
async def test_what_cannot_be_asked_of_a_kept_response_is_refused_by_name(query: str, param: str) -> None:
    async with serving(whole) as (running, _):
        _, sent = await ask(running)
        status, refused = await call(running, sent["id"] + query)
        assert (status, error_of(refused)["param"]) == (400, param)


async def test_a_stranger_s_response_is_as_one_that_there_never_was() -> None:
    settings = dataclasses.replace(config(), admission=AdmissionConfig(api_keys=KEYS))
    async with serving(whole, whole, settings=settings) as (running, asked):
        mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
        async with running.http.post(ROUTE, json={"model": "m", "input": "Hi"}, headers=mine) as response:
            name = json.loads(await response.read())["id"]
        missing = name[:-4] + "0000"
        for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            answers = [await call(running, each + path, method, KEYS[1]) for each in (name, missing)]
            assert answers[0] == (answers[1][0], answers[1][1].replace(missing.encode(), name.encode()))
            assert answers[0][0] == 404
        body = {"model": "m", "input": "Hi", "previous_response_id": name}
        async with running.http.post(ROUTE, json=body, headers=other) as response:
            assert response.status == 404
        assert len(asked.asked) == 1
        assert (await call(running, name))[0] == 401
        assert (await call(running, name, key=KEYS[0]))[0] == 200


@asynccontextmanager
async def stalled_reader(running: Cluster, path: str, key: str) -> AsyncIterator[None]:
    """A client that has asked for a response, and reads no more of it than its head."""
    host, _, port = running.addresses.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**14)
    with closing(writer):
        writer.write(f"GET {ROUTE}/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        yield


@pytest.mark.parametrize("path", ["", "/input_items"])
async def test_what_slow_readers_of_kept_responses_hold_is_bounded_for_each_client(path: str) -> None:
    text = "x" * LARGE

    async def large(exchange: Exchange) -> None:
        await exchange.answer(200, json.dumps(response_of(exchange, text)).encode())

    admission = AdmissionConfig(api_keys=KEYS, body_memory_mib=LARGE * 4 // 2**20 + 1)
    http = dataclasses.replace(proxy_config().http, max_body_bytes=LARGE + 9_999)
    settings = dataclasses.replace(config(store_mib=512), admission=admission, http=http)
    body = json.dumps({"model": "m", "input": text}).encode()
    async with serving(large, large, settings=settings) as (running, _):
        names = []
        for key in KEYS:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            async with running.http.post(ROUTE, data=BytesIO(body), headers=headers) as response:
                assert response.status == 200
                names.append(json.loads(await response.read())["id"])
        mine = names[0] + path, KEYS[0]
        async with stalled_reader(running, *mine), stalled_reader(running, *mine):
            status, refused = await call(running, names[0] + path, key=KEYS[0])
            assert (status, error_of(refused)["code"]) == (429, "too_many_uploads")
            assert (await call(running, names[1] + path, key=KEYS[1]))[0] == 200

        async def freed() -> bool:
            return (await call(running, names[0] + path, key=KEYS[0]))[0] == 200

        await eventually(freed, "the client that left holds nothing")


async def test_a_kept_response_is_read_that_is_larger_than_what_a_client_may_hold() -> None:
    async def large(exchange: Exchange) -> None:
        await exchange.answer(200, json.dumps(response_of(exchange, "x" * 2**20)).encode())

    admission = dataclasses.replace(proxy_config().admission, body_memory_mib=1)
    http = dataclasses.replace(proxy_config().http, max_body_bytes=2**16)
    settings = dataclasses.replace(config(store_mib=64), admission=admission, http=http)
    async with serving(large, settings=settings) as (running, _):
        name = (await ask(running))[1]["id"]
        status, body = await call(running, name)
        assert (status, len(body) > 2**20) == (200, True)


async def test_other_methods_of_kept_responses_are_refused() -> None:
    async with serving(whole) as (running, _):
        name = (await ask(running))[1]["id"]
        for path, allowed in ((name, "GET, DELETE, OPTIONS"), (f"{name}/input_items", "GET, OPTIONS")):
            async with running.http.post(f"{ROUTE}/{path}", json={}) as response:
                assert (response.status, response.headers["allow"]) == (405, allowed)
        status, refused = await call(running, f"{name}/other")
        assert (status, error_of(refused)["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_too_large_reaches_its_client_alone(stream: bool) -> None:
    text = "x" * 200_000

    async def large(exchange: Exchange) -> None:
        response = json.dumps(response_of(exchange, text)).encode()
        if not stream:
            await exchange.answer(200, response)
            return
        await exchange.begin_stream()
        await exchange.chunk(DONE_ENTRY + b'event: response.completed\ndata: {"response": %b}\n\n' % response)
        await exchange.finish()

    async with serving(large, settings=config(store_mib=1)) as (running, _):
        async with running.http.post(ROUTE, json={"model": "m", "input": "Hi", "stream": stream}) as reply:
            data = (await reply.read()).partition(b"data: ")[2] if stream else await reply.read()
        sent = json.loads(data)["response"] if stream else json.loads(data)
        assert sent["output"][0]["content"] == text
        assert (await call(running, sent["id"]))[0] == 404
        assert await metric(running, "pdserve_proxy_store_bytes") == 0


async def test_a_proxy_without_a_store_says_so() -> None:
    async with serving(whole, settings=proxy_config()) as (running, asked):
        _, sent = await ask(running, store=True)
        assert (sent["store"], asked.tickets[0].terms.storing) == (False, None)
        status, refused = await call(running, sent["id"])
        assert (status, error_of(refused)["code"]) == (404, "responses_not_stored")


async def test_a_conversation_above_the_bound_of_bodies_is_refused() -> None:
    settings = config()
    settings = dataclasses.replace(settings, http=dataclasses.replace(settings.http, max_body_bytes=2_000))
    async with serving(whole, whole, settings=settings) as (running, asked):
        _, first = await ask(running, input="x" * 1_500)
        _, second = await ask(running, input="x" * 1_500, previous_response_id=first["id"])
        status, refused = await ask(running, input="x", previous_response_id=second["id"])
        assert (status, refused["error"]["param"]) == (413, "previous_response_id")
        assert len(asked.asked) == 2


@pytest.mark.integration
async def test_every_worker_has_the_responses_of_all() -> None:
    """Each request has a connection of its own, so that any worker may get it."""
    settings = dataclasses.replace(config(), workers=WorkersConfig(2))
    async with cluster(settings) as running, nodes(running, *[whole] * 8, count=1) as asked:
        await running.known_to_all()
        headers = {"connection": "close"}
        previous = None
        for number in range(8):
            body = {"model": "m", "input": f"{number}", "previous_response_id": previous}
            async with running.http.post(ROUTE, json=body, headers=headers) as response:
                sent = json.loads(await response.read())
                assert response.status == 200, sent
            previous = sent["id"]
            assert len(history_in(asked, number)) == 2 * number
            for _ in range(3):
                async with running.http.get(f"{ROUTE}/{previous}", headers=headers) as response:
                    assert json.loads(await response.read()) == sent
        assert await metric(running, "pdserve_proxy_stored_responses") == 8
        async with running.http.delete(f"{ROUTE}/{previous}", headers=headers) as response:
            assert response.status == 200
        async with running.http.get(f"{ROUTE}/{previous}/input_items", headers=headers) as response:
            assert response.status == 404
