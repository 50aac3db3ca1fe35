"""What has ended in a proxy is freed at once: Python looks for reference cycles seldom there, and bodies are large."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from quart import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdserve.config import AdmissionConfig, RelayConfig
from pdserve.http.guard import GuardedHttp
from pdserve.http.outlet import Outlet
from pdserve.http.request import HttpRequest
from pdserve.process import free_port
from pdserve.wire.discovery import Role
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.upstream.node_connection import NodeConnection
from tests.proxy.cluster import cluster, eventually, node_info, proxy_config
from tests.proxy.fake_node import DONE, EVENTS, Exchange, FakeNode

KEY = "a-key-0123456789"
OF_REQUESTS = (GuardedHttp, Outlet, RequestResponseCycle, HttpRequest, RelayedRequest, Request)
GOOD = b'{"model": "m", "prompt": "x"}'
TIMES = 5


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(*kinds: type) -> Counter[str]:
    """Returns how many objects there are of each of ``kinds``: of all that clients have here, if none is given."""
    # isinstance() would ask each object for __class__, and one in torch.distributed warns of any question.
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if issubclass(kind, kinds or OF_REQUESTS))


async def ask(url: str, request: bytes) -> bytes:
    """Returns all that comes before the server ends the connection."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    with closing(writer):
        writer.write(request)
        return await reader.read()


async def leave(url: str, request: bytes) -> None:
    """Leaves when the request has begun."""
    parts, before = urlsplit(url), left()["HttpRequest"]
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    with closing(writer):
        writer.write(request)
        await eventually(lambda: left()["HttpRequest"] > before, "the request began")


def post(body: bytes, path: str = "/v1/completions", key: str = KEY) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def behave(exchange: Exchange) -> None:
    """Answers by what the prompt says."""
    if b"die" in exchange.request.body:
        exchange.die()
    elif b"wait" in exchange.request.body:
        await exchange.gone()
    elif b"stream" in exchange.request.body:
        await exchange.begin_stream()
        for event in [*EVENTS, DONE]:
            await exchange.chunk(event)
        await exchange.finish()
    else:
        await exchange.answer(200, b"{}")


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(post(GOOD), b" 200 ", id="answered"),
        pytest.param(post(GOOD.replace(b"}", b', "stream": true}')), b"[DONE]", id="streamed"),
        pytest.param(post(b'{"model": "m", "prompt": "' + b"x" * 100_000), b" 400 ", id="no JSON"),
        pytest.param(post(GOOD.replace(b'"m"', b'"another"')), b" 404 ", id="unknown model"),
        pytest.param(post(GOOD, key="another-key-0123456789"), b" 401 ", id="unknown key"),
        pytest.param(post(GOOD, path="/v1/another"), b" 404 ", id="unknown URL"),
        pytest.param(post(GOOD.replace(b'"x"', b'"die"')), b" 502 ", id="node lost"),
        pytest.param(b"nonsense\r\n\r\n", b" 400 ", id="no HTTP"),
    ],
)
@pytest.mark.usefixtures("no_collector")
async def test_an_ended_request_leaves_nothing_for_the_collector(request_: bytes, answer: bytes) -> None:
    relay = RelayConfig(suspect_s=0)  # a request with which nodes are lost may come again
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=(KEY,)), relay=relay)
    async with FakeNode(behave) as node, FakeNode(behave) as other, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        await running.add(node_info("y", Role.MIXED, other.url))
        before = left()
        for _ in range(TIMES):
            assert answer in await ask(running.addresses.url, request_)
        await eventually(lambda: left() == before, f"{TIMES} requests were freed")


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(post(GOOD.replace(b'"x"', b'"wait"')), id="before an answer"),
        pytest.param(post(GOOD)[:-5], id="within its body"),
    ],
)
@pytest.mark.usefixtures("no_collector")
async def test_a_client_that_leaves_leaves_nothing_for_the_collector(request_: bytes) -> None:
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=(KEY,)))
    async with FakeNode(behave) as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        before = left()
        for _ in range(TIMES):
            await leave(running.addresses.url, request_)
            await eventually(lambda: left() == before, "the request was freed")


@pytest.mark.usefixtures("no_collector")
async def test_a_node_that_cannot_be_reached_leaves_nothing_for_the_collector() -> None:
    async with cluster() as running:
        await running.add(node_info("x", Role.MIXED, f"http://127.0.0.1:{free_port()}"))
        before = left(NodeConnection)  # another proxy of this process may have some
        for _ in range(TIMES):
            assert b" 503 " in await ask(running.addresses.url, post(GOOD))
        await eventually(lambda: left(NodeConnection) <= before, "no connection is left")
