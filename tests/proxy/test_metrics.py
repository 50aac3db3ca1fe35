"""Tests the proxy's metrics: series that exist from the start, what nodes did, and workers that die."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from pdserve.tracing.tracing import RecentParts
from pdserve.wire.discovery import Register, Role
from pdserve.wire.proxy_workers import Credentials
from pdserve_proxy.continuation.losses import Suspects
from pdserve_proxy.credentials import LiveCredentials
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.registry import Registry, RegistryMirror
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.workers import worker_channel
from pdserve_proxy.workers.worker import SupervisorChannel
from pdserve_proxy.workers.worker_channel import WorkerChannel
from tests.proxy.cluster import SECRET, Cluster, cancelled, cluster, eventually, node_info
from tests.proxy.journaling_nodes import SHOWN, complete, die_at_once, dies_at, nodes, refuses

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Series:
    """Returns the value of each series. Raises ValueError for text that is none of Prometheus's."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def shown(running: Cluster) -> Series:
    async with running.http.get("/metrics") as response:
        return parsed(await response.text())


async def ask(running: Cluster) -> bytes:
    async with running.chat(stream=True) as response:
        return await response.read()


def of(series: Series, name: str, **labels: str) -> float:
    return series[f"pdserve_proxy_{name}", frozenset(labels.items())]


async def test_every_series_is_there_before_anything_has_failed() -> None:
    # A node that dies without a byte on a connection that was used before is asked once more on a new one.
    behaviours = [complete, dies_at(3), complete, refuses(503), refuses(503), *[die_at_once] * 4]
    async with cluster() as running, nodes(running, *behaviours, count=2) as asked:
        fresh = await shown(running)
        assert await ask(running) == await ask(running) == SHOWN
        for status in (503, 502):
            async with running.chat(stream=True) as refused:
                assert refused.status == status
        await asked.made[0].stop()
        await asked.made[1].stop()
        # Another request than the one with which both nodes were lost, which is refused for a while.
        async with running.chat(stream=True, max_tokens=1) as unreachable:
            assert unreachable.status == 503
        for path, body, status in (("chat/completions", b"{", 400), ("completions", b'{"model": "x"}', 404)):
            async with running.http.post(f"/v1/{path}", data=body) as refused:
                assert refused.status in (status, 415)
        async with running.http.get("/v1/nothing") as missing:
            assert missing.status == 404
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 0)
            stranger.connect(running.addresses.control)
            await stranger.send(b"no frame")

            async def dropped() -> bool:
                found = await shown(running)
                return sum(value for (name, _), value in found.items() if "frames_dropped_total" in name) == 1

            await eventually(dropped, "the frame is dropped")
        after = await shown(running)
        assert after.keys() == fresh.keys()
        assert of(after, "resumes_total", outcome="resumed") == 1
        failures = {
            kind: sum(of(after, "node_failures_total", node=node, kind=kind) for node in ("n0", "n1"))
            for kind in ("lost", "refused", "unreachable")
        }
        assert failures == {"lost": 3, "refused": 2, "unreachable": 2}
        assert sum(of(after, "node_resumed_total", node=node) for node in ("n0", "n1")) == 1
        assert sum(of(after, "node_requests_total", node=node) for node in ("n0", "n1")) == 9
        assert sum(of(after, "node_time_to_first_byte_seconds_count", node=node) for node in ("n0", "n1")) == 2
        assert all(of(after, "node_requests_in_flight", node=node) == 0 for node in ("n0", "n1"))


async def test_what_a_worker_counted_outlives_it_though_nobody_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_channel, "PING_S", 0.02)
    address, registry = f"ipc://{tmp_path}/channel", Registry(1.0, 3)
    registry.handle(Register(node_info("n", Role.MIXED)), 0.0)
    metrics = [ProxyMetrics(f"worker-{number}") for number in range(2)]
    for of_worker in metrics:
        of_worker.counts.watch(registry, Attempts())
    names = [b"0.1", b"1.1"]
    with WorkerChannel(address, registry, ProxyMetrics("supervisor")) as hub:
        for name in names:
            hub.expect(name).ready.set()
        serving = asyncio.create_task(hub.run())
        workers = [
            SupervisorChannel(
                *(address, name, RegistryMirror(Attempts()), of_worker),
                LiveCredentials(Credentials(SECRET, ())),
                RecentParts(0),
                Suspects(60.0),
            )
            for name, of_worker in zip(names, metrics, strict=True)
        ]
        try:
            with workers[0] as victim, workers[1] as other:
                dying, living = asyncio.create_task(victim.run()), asyncio.create_task(other.run())
                await victim.has_nodes.wait()
                await other.has_nodes.wait()
                (node,) = registry.snapshot().nodes
                for of_worker, count in zip(metrics, (5, 2), strict=True):
                    of_worker.counts.requests["/v1/completions", 200] += count
                    for _ in range(count):
                        of_worker.counts.nodes.began(node.info)
                # Its answer to a ping has the counts, and its answer to the next one has nothing to add.
                await eventually(lambda: victim._told == 5, "the victim has told")
                await eventually(lambda: bool(hub._workers[b"0.1"]), "the supervisor knows")
                await cancelled(dying)
                hub.retire(b"0.1")
                found = parsed((await other.scrape()).decode())
                assert of(found, "requests_total", route="/v1/completions", status="200") == 7
                assert of(found, "node_requests_total", node="n") == 7
                assert ("process_threads", frozenset({("process", "worker-1")})) in found
                assert ("process_threads", frozenset({("process", "worker-0")})) not in found
                await cancelled(living)
        finally:
            await cancelled(serving)
