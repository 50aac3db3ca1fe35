"""A node whose blocks run out under two streams gives one of them to a node that has some."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, cluster, sample
from tests.eventually import eventually
from tests.faults.test_failover import Client
from tests.faults.test_node_death import engine_pid

TOKENS = 160
"""The cache of a node holds 272 tokens: one answer, and not two."""
COMMON = {"model": MODEL, "prompt": "Once upon a time there was", "max_tokens": TOKENS, "ignore_eos": True}
SEEDS = (31, 32)


@pytest.fixture(scope="module")
def crowded(slow_tiny_model: Path) -> Iterator[Cluster]:
    """Yields two nodes, of which one gets all prompts that begin alike."""
    shape = ("--dtype", "bf16", "--kv-cache-mib", "1", "--max-model-len", "200")
    # Engines that the test stops are not taken for hanging.
    flags = (*shape, "--engine-silence-ms", "600000")
    policy = ("--policy", "prefix-affinity")
    with cluster(slow_tiny_model, *flags, prefill=0, decode=0, mixed=2, proxy_flags=policy, forked=True) as running:
        yield running


def ask(at: Cluster, name: str, seed: int) -> Client:
    return Client(at.url, name, str(seed), {**COMMON, "stream": True, "seed": seed})


def together(at: Cluster) -> dict[int, Client]:
    """Returns clients whose streams begin in the same step: until both are there, no engine runs."""
    engines = [engine_pid(node) for node in at.nodes]
    try:
        for engine in engines:
            os.kill(engine, signal.SIGSTOP)
        clients = {seed: ask(at, "together", seed) for seed in SEEDS}
        eventually(lambda: sample(at.url, "proxy_requests_in_flight") == len(SEEDS), "both are there")
    finally:
        for engine in engines:
            os.kill(engine, signal.SIGCONT)
    return clients


def test_a_stream_moves_to_a_node_with_room(crowded: Cluster) -> None:
    unbroken = {seed: ask(crowded, "alone", seed).answer() for seed in SEEDS}
    crowded.until_idle()
    for seed, client in together(crowded).items():
        client.answer().like(unbroken[seed])
    assert sample(crowded.url, "proxy_block_moves_total", outcome="moved") >= 1
    assert sum(node.metric("num_moves_wanted_total") for node in crowded.decode) >= 1
    assert sample(crowded.url, "proxy_resumes_total", outcome="resumed") == 0
    crowded.until_idle()
