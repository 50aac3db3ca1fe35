"""Tests that a proxy that was stopped, as in a suspended virtual machine, keeps living nodes and their requests."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
import pytest

from pdserve.wire.discovery import Role
from tests.processes import SECRET, Process, pdserve
from tests.proxy.cluster import eventually, node_info, registered, run_async
from tests.proxy.fake_node import Exchange, FakeNode, answer_ok

HEARTBEAT_MS = 200
STOPPED_S = 1.5
"""The proxy is stopped for more than two leases."""


class Instance(msgspec.Struct):
    name: str
    heartbeat_age_s: float


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_proxy_still_has_its_nodes(workers: int) -> None:
    ports = ("--port", "0", "--control-port", "0", "--heartbeat-ms", str(HEARTBEAT_MS))
    with pdserve("proxy", *ports, "--workers", str(workers)) as proxy:
        found = proxy.listening()
        run_async(scenario(proxy, found.url, found.control))
        assert "no heartbeat" not in proxy.output


async def scenario(proxy: Process, url: str, control: str) -> None:
    go_on = asyncio.Event()

    async def answer_later(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_ok(exchange)

    async def ask() -> bytes:
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json={}) as response:
            return await response.read()

    async with (
        FakeNode(answer_later) as fake,
        registered(node_info("n", Role.MIXED, fake.url), control, secret=SECRET.encode()) as node,
    ):
        asked = asyncio.create_task(until_known(ask))
        await eventually(lambda: bool(fake.requests), "the node has a request")
        proxy.popen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        proxy.popen.send_signal(signal.SIGCONT)
        async with aiohttp.ClientSession() as http:

            async def heard() -> bool:
                async with http.get(f"{url}/instances") as response:
                    listed = msgspec.json.decode(await response.read(), type=list[Instance])
                return any(instance.heartbeat_age_s < STOPPED_S / 2 for instance in listed)

            await eventually(heard, "a heartbeat is heard")
        await node.registered[control].wait()
        go_on.set()
        assert await asked == b'{"ok": true}', "what runs at the node goes on"
        assert len(fake.requests) == 1


async def until_known(ask: Callable[[], Awaitable[bytes]]) -> bytes:
    """Returns the first answer that is not refused, since a worker may know the node later than its supervisor."""
    while b"no_nodes" in (body := await ask()):
        continue
    return body
