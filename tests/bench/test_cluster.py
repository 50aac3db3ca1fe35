"""Tests that a benchmark's node is ready, or refused, in bounded time, and what a benchmark reads of servers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest

from pdserve.bench.cluster import NodeAddress, known_nodes, read_metrics, running_node, total, until_known
from pdserve.errors import BenchError
from pdserve.process import ChildDied
from tests.processes import clean_environ


async def enter(flags: list[str], timeout_s: float, **environ: str) -> str:
    async with running_node("node", flags, clean_environ(**environ), timeout_s) as url:
        return url


@pytest.mark.integration
async def test_it_listens_on_loopback_whatever_the_environment_says(tiny_model: Path, tmp_path: Path) -> None:
    environ = {
        "PDSERVE_HOST": "0.0.0.0",
        "PDSERVE_PROXY": "tcp://127.0.0.1:9",
        "PDSERVE_LOG_LEVEL": "error",
        "PDSERVE_KV_CACHE_MIB": "64",
        "PDSERVE_CORES": str(min(os.sched_getaffinity(0))),
        "XDG_STATE_HOME": str(tmp_path),
    }
    assert (await enter(["--model", str(tiny_model)], 120.0, **environ)).startswith("http://127.0.0.1:")


@pytest.mark.integration
async def test_a_node_that_ends_tells_why() -> None:
    with pytest.raises(ChildDied, match="there is no model '/nowhere'"):
        await enter(["--model", "/nowhere"], 120.0)


@pytest.mark.integration
async def test_a_node_that_is_late_is_given_up() -> None:
    with pytest.raises(BenchError, match=r"was not ready after 0\.1 s"):
        await enter([], 0.1)


LOOPBACK = "127.0.0.1"


class Listing:
    """A server that knows one node more each time that it is asked, up to ``most``, and counts the questions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._registry = CollectorRegistry()
        self._asked = Counter("asked", "Questions.", ["what"], registry=self._registry)
        self._times = 0

    async def instances(self, _: web.Request) -> web.Response:
        self._asked.labels("instances").inc()
        known = [{"name": f"node-{i}", "url": "", "role": "decode"} for i in range(min(self._times, self._most))]
        self._times += 1
        return web.json_response(known)

    async def metrics(self, _: web.Request) -> web.Response:
        self._asked.labels("metrics").inc()
        return web.Response(body=generate_latest(self._registry))


@asynccontextmanager
async def listing(most: int) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    server, app = Listing(most), web.Application()
    app.add_routes([web.get("/instances", server.instances), web.get("/metrics", server.metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, 0).start()
        async with aiohttp.ClientSession() as session:
            yield session, f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_it_asks_until_all_nodes_are_known() -> None:
    async with listing(2) as (session, url):
        await until_known(session, url, 2, 60.0)
        assert await known_nodes(session, url) == [NodeAddress("node-0", ""), NodeAddress("node-1", "")]
        metrics = await read_metrics(session, url)
    assert total(metrics, "asked_total", what="instances") == 4
    assert total(metrics, "asked_total") == 5
    assert total(metrics, "asked_total", what="nothing") == total(metrics, "unknown_total") == 0


async def test_a_node_that_does_not_come_ends_the_benchmark() -> None:
    async with listing(1) as (session, url):
        with pytest.raises(BenchError, match=r"did not know 2 nodes after 0\.2 s"):
            await until_known(session, url, 2, 0.2)


async def test_an_error_status_is_no_metrics() -> None:
    async with listing(1) as (session, url):
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            await read_metrics(session, f"{url}/absent")
