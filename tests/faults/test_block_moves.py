"""A node whose blocks run out under two streams gives one of them to a node that has some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, cluster, sample
from tests.faults.test_failover import Client, until_received

TOKENS = 160
"""The cache of a node holds 272 tokens: one answer, and not two."""
COMMON = {"model": MODEL, "prompt": "Once upon a time there was", "max_tokens": TOKENS, "ignore_eos": True}
SEEDS = (31, 32)


@pytest.fixture(scope="module")
def crowded(slow_tiny_model: Path) -> Iterator[Cluster]:
    """Yields two nodes, of which one gets all prompts that begin alike."""
    flags = ("--dtype", "bf16", "--kv-cache-mib", "1", "--max-model-len", "200")
    with cluster(
        slow_tiny_model, *flags, prefill=0, decode=0, mixed=2, proxy_flags=("--policy", "prefix-affinity")
    ) as running:
        yield running


def ask(at: Cluster, name: str, seed: int) -> Client:
    client = Client(at.url, name, str(seed), {**COMMON, "stream": True, "seed": seed})
    until_received(client, 0)
    return client


def test_a_stream_moves_to_a_node_with_room(crowded: Cluster) -> None:
    unbroken = {seed: ask(crowded, "alone", seed).answer() for seed in SEEDS}
    crowded.until_idle()
    clients = {seed: ask(crowded, "together", seed) for seed in SEEDS}
    for seed, client in clients.items():
        client.answer().like(unbroken[seed])
    assert sample(crowded.url, "proxy_block_moves_total", outcome="moved") >= 1
    assert sum(node.metric("num_moves_wanted_total") for node in crowded.decode) >= 1
    assert sample(crowded.url, "proxy_resumes_total", outcome="resumed") == 0
    crowded.until_idle()
