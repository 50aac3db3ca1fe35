"""Nodes that drain under running streams end long before the streams do, and no client notices.

In every run, a node drains under one stream in ``tests/cluster/test_group_return.py``, and under load in
``tests/cluster/test_role_switch.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, cluster, http
from tests.eventually import eventually
from tests.faults.test_failover import STREAMED, TEXT, TOKENS, WHOLE, Answer, Client, Failing, until_received
from tests.processes import Process, pdserve

LONG: Mapping[str, object] = {"stream": True, "max_tokens": 5 * TOKENS}
"""Requests whose answers are far from their end when their node is gone."""
BODIES: dict[str, Mapping[str, object]] = {
    **{
        name: {"stream": True, **STREAMED[name]} for name in ("greedy", "several", "usage", "logprobs", "ruled", "echo")
    },
    **{name: WHOLE[name] for name in ("whole", "whole echo")},
    **{f"long {seed}": {**LONG, "seed": seed} for seed in range(21, 25)},
}


@dataclass(frozen=True)
class Draining:
    """A cluster whose nodes belong to two proxies, of which the second has two workers."""

    nodes: Failing
    proxies: tuple[Process, Process]

    @property
    def cluster(self) -> Cluster:
        return self.nodes.cluster

    def ask(self, round_name: str) -> dict[str, Client]:
        """Sends every request at once, in turns to one and to the other proxy."""
        common = {"model": MODEL, "prompt": TEXT, "max_tokens": TOKENS, "ignore_eos": True}
        urls = [proxy.listening().url for proxy in self.proxies]
        bodies = [(name, {**common, **body}) for name, body in BODIES.items()]
        return {name: Client(urls[turn % 2], round_name, name, body) for turn, (name, body) in enumerate(bodies)}

    def moved(self, proxy: Process) -> set[str]:
        """The labels of all requests that the proxy says it has moved."""
        return set(re.findall(r"request_id=(\S+) moved", proxy.output))


@pytest.fixture(scope="module")
def draining(slow_tiny_model: Path) -> Iterator[Draining]:
    with ExitStack() as stack:
        several = stack.enter_context(pdserve("proxy", "--port", "0", "--control-port", "0", "--workers", "2"))
        flags = ("--dtype", "bf16", "--kv-cache-mib", "64", "--proxy", several.listening().control)
        running = stack.enter_context(cluster(slow_tiny_model, *flags, decode=2))
        eventually(lambda: len(http(several.listening().url + "/instances").json()) == 3, "both proxies know the nodes")
        yield Draining(Failing(running, slow_tiny_model, stack), (running.proxy, several))


@pytest.mark.nightly
def test_streams_move_to_another_node_and_the_old_one_ends(draining: Draining) -> None:
    unbroken: dict[str, Answer] = {name: client.answer() for name, client in draining.ask("unbroken").items()}
    clients = draining.ask("drained")
    for name in clients:
        if name.startswith("long"):
            until_received(clients[name], 1000)
    leaving = draining.cluster.decode[0]
    leaving.process.terminate()
    assert leaving.process.wait() == 0
    unfinished = {name for name, client in clients.items() if client.thread.is_alive()}
    for name, client in clients.items():
        client.answer().like(unbroken[name])
    assert {name for name in clients if name.startswith("long")} <= unfinished
    moved = [draining.moved(proxy) for proxy in draining.proxies]
    assert all(moved), "streams of both proxies have moved"
    assert "not everything finished in time" not in leaving.process.output
    for proxy in draining.proxies:
        metrics = http(proxy.listening().url + "/metrics").body.decode()
        assert 'pdserve_proxy_moves_total{outcome="stayed"} 0.0' in metrics
        assert 'pdserve_proxy_resumes_total{outcome="resumed"} 0.0' in metrics
    states = http(draining.cluster.url + "/instances").json()
    assert {node["name"] for node in states} == {"prefill-0", "decode-1"}, json.dumps(states)
