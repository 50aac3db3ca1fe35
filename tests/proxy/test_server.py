"""A proxy as a process of its own: it says where it listens, drains on a signal, and exits with 0."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from pdserve.wire.discovery import Role
from tests.cluster.process_forks import forks
from tests.processes import pdserve
from tests.proxy.cluster import SECRET, node_info, registered
from tests.proxy.fake_node import Exchange, FakeNode

pytestmark = pytest.mark.integration

PROGRAM = """
import sys
from pdserve.config import HttpConfig, ProxyConfig, RegistryConfig
from pdserve_proxy.server import serve
config = ProxyConfig(
    http=HttpConfig(port=0, drain_s=float(sys.argv[2])), registry=RegistryConfig(control_port=0, heartbeat_ms=200)
)
sys.exit(serve(config, sys.argv[1].encode()))
"""
LISTENING = re.compile(rb"INFO .*pdserve proxy listening url=(http://\S+) control=(tcp://\S+)")


@asynccontextmanager
async def proxy_process(drain_s: float) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, SECRET.decode(), str(drain_s), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            while not (found := LISTENING.search(await process.stderr.readline())):
                assert process.returncode is None
        yield process, found[1].decode(), found[2].decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_running_stream_finish_and_then_exits_with_0(number: signal.Signals) -> None:
    go_on = asyncio.Event()

    async def slow_stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"data: 1\n\n")
        await go_on.wait()
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.finish()

    async with (
        FakeNode(slow_stream) as node,
        proxy_process(drain_s=10) as (process, url, control),
        registered(node_info("x", Role.MIXED, node.url), control),
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", json={"stream": True}) as response,
    ):
        assert await response.content.readany() == b"data: 1\n\n"
        process.send_signal(number)
        await refuses_connections(url)
        go_on.set()
        assert await response.read() == b"data: [DONE]\n\n"
        async with asyncio.timeout(5):
            assert await process.wait() == 0


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.gone()

    async with (
        FakeNode(endless) as node,
        proxy_process(drain_s=0.2) as (process, url, control),
        registered(node_info("x", Role.MIXED, node.url), control),
        aiohttp.ClientSession(url) as http,
        http.post("/v1/completions", json={"stream": True}) as response,
    ):
        assert await response.content.readany() == b"data: 1\n\n"
        process.send_signal(signal.SIGTERM)
        body = await response.read()
        assert body.startswith(b'event: error\ndata: {"error":')
        assert b"shutting_down" in body
        async with asyncio.timeout(5):
            assert await process.wait() == 0


OPEN = "there are no API keys: --api-key-file names a file of keys"


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--workers", "2"], True),
        (["--host", "0.0.0.0", "--api-key", "0123456789abcdef"], False),
        ([], False),
    ],
    ids=str,
)
def test_a_proxy_that_everybody_may_use_says_so(flags: list[str], warns: bool) -> None:
    program = forks().command("pdserve")
    with pdserve("proxy", "--port", "0", "--control-port", "0", *flags, program=program) as proxy:
        proxy.listening()
        proxy.terminate()
        assert proxy.wait() == 0
        assert (OPEN in proxy.output) is warns


async def refuses_connections(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.01)
