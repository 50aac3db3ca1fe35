"""Tests the timelines of a running proxy whose nodes are fakes, which remember nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from pdserve.config import AdmissionConfig, TraceConfig
from pdserve.wire.timeline import TraceContext
from tests.proxy.cluster import Cluster, cluster, proxy_config
from tests.proxy.journaling_nodes import complete, dies_at, nodes, refuses

KEY = "a-key-of-a-client-0123"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def ask(running: Cluster, request_id: str, **headers: str) -> int:
    """Returns the status of an answer that has been read."""
    body = {"model": "m", "stream": True}
    named = {"x-request-id": request_id, **headers}
    async with running.http.post("/v1/completions", json=body, headers=named) as response:
        await response.read()
        return response.status


async def timeline(running: Cluster, request_id: str, **headers: str) -> tuple[int, Any]:
    async with running.http.get(f"/requests/{request_id}/timeline", headers=headers) as response:
        return response.status, await response.json()


async def test_a_resumed_stream_has_both_attempts_and_its_gap() -> None:
    async with cluster() as running, nodes(running, dies_at(2), complete, *[refuses(401)] * 2, count=2):
        assert await ask(running, "chat-1") == 200
        status, found = await timeline(running, "chat-1")
        assert (status, found["finished"]) == (200, True)
        (part,) = found["parts"]
        attempts = [phase for phase in part["phases"] if phase["kind"] == "attempt"]
        assert [attempt["outcome"] for attempt in attempts] == ["lost", "ok"]
        assert attempts[0]["end_s"] <= attempts[1]["start_s"]
        moments = {moment["kind"]: moment for moment in part["moments"]}
        assert moments.keys() == {"first_byte", "lost", "resumed"}
        assert moments["lost"]["node"] == attempts[0]["node"]
        assert moments["resumed"]["node"] == attempts[1]["node"]
        assert moments["resumed"]["gap_s"] >= 0
        # The fakes do not answer commands as nodes do.
        assert set(found["silent"]) == {attempt["node"] for attempt in attempts}


async def test_who_has_no_key_reads_no_timeline_and_leaves_none() -> None:
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=(KEY,)))
    async with cluster(config) as running, nodes(running, complete, *[refuses(401)] * 2, count=1):
        assert await ask(running, "mine", authorization=f"Bearer {KEY}") == 200
        assert await ask(running, "theirs") == 401
        assert (await timeline(running, "mine"))[0] == 401
        assert (await timeline(running, "mine", authorization=f"Bearer {KEY}"))[0] == 200
        status, body = await timeline(running, "theirs", authorization=f"Bearer {KEY}")
        assert (status, body["error"]["code"]) == (404, "no_timeline")


async def test_a_proxy_that_exports_nothing_passes_the_clients_trace_on() -> None:
    async with cluster() as running, nodes(running, complete, complete) as asked:
        await ask(running, "a", traceparent=f"00-{TRACE}-{SPAN}-01")
        await ask(running, "b", traceparent=f"00-{TRACE}-{SPAN}-00")
        traces = [ticket.terms.prompt.trace for ticket in asked.tickets]
        assert traces == [TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN)), None]


async def test_a_proxy_that_remembers_nothing_says_so() -> None:
    config = dataclasses.replace(proxy_config(), trace=TraceConfig(kept_timelines=0))
    async with cluster(config) as running, nodes(running, complete, refuses(401), count=1):
        assert await ask(running, "chat-1") == 200
        assert (await timeline(running, "chat-1"))[0] == 404
