"""Servers keep idle connections longer than their clients do, and not without a bound."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from pdserve.config import HttpConfig, ProxyConfig
from pdserve_proxy.upstream.node_pool import IDLE_S
from tests.http.http_serving import http_serving
from tests.proxy.cluster import cluster, proxy_config

GET = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
GO_S = 90
"""The seconds for which Go's HTTP client keeps an idle connection. Other clients keep it less (aiohttp 15, httpx 5)."""


def test_clients_and_proxies_give_idle_connections_up_before_their_server_does() -> None:
    """Otherwise a request could go out on a connection that is being closed."""
    kept = HttpConfig().keep_alive_s
    assert kept == ProxyConfig().http.keep_alive_s
    assert kept >= IDLE_S + 30
    assert kept >= GO_S + 30


@asynccontextmanager
async def node_server(config: HttpConfig) -> AsyncIterator[tuple[str, int]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"15")]})
        await send({"type": "http.response.body", "body": b'{"status":"ok"}'})

    async with http_serving(app, config) as address:
        yield address


@asynccontextmanager
async def proxy_server(config: HttpConfig) -> AsyncIterator[tuple[str, int]]:
    async with cluster(dataclasses.replace(proxy_config(), http=config)) as running:
        host, _, port = running.addresses.url.removeprefix("http://").partition(":")
        yield host, int(port)


@pytest.mark.parametrize("serving", [node_server, proxy_server])
async def test_the_setting_says_how_long_an_idle_connection_is_kept(serving: Any) -> None:
    """The server with the shorter time closes first, although it was asked last."""

    async def ask(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):  # An answer does not end the connection.
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}")
        return reader, writer

    async with serving(HttpConfig(keep_alive_s=5)) as patient, serving(HttpConfig(keep_alive_s=1)) as hasty:
        long, long_writer = await ask(patient)
        short, short_writer = await ask(hasty)
        with closing(long_writer), closing(short_writer):
            async with asyncio.timeout(20):
                assert await short.read() == b""
            assert not long.at_eof()
