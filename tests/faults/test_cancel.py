"""Tests that a client that leaves at any step frees everything on both nodes and does not delay the next request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, Node, cluster, http, one_core, start_node
from tests.cluster.test_cluster import open_stream
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid

CHUNK = 32
LONG = [11 + i % 400 for i in range(2000)]
CHUNKS_OF_LONG = -(-len(LONG) // CHUNK)
ONE_OF_TEN = LONG[:800]
"""Ten prompts of this length fit into the decode node's KV cache at once."""
SHORT = LONG[: 2 * CHUNK]
CHUNKS_OF_SHORT = 2
FLAGS = (
    *("--dtype", "fp32", "--max-num-batched-tokens", str(CHUNK), "--prefix-cache", "off"),
    # With this lease, a node that a test has stopped is not taken for dead.
    *("--transfer-lease-ms", "60000"),
)

ROOMY = ("--max-num-seqs", "16", "--kv-cache-mib", "512")


@pytest.fixture(scope="module")
def nodes(slow_tiny_model: Path) -> Iterator[Cluster]:
    """Yields a decode node, and a prefill node that computes one prompt at a time."""
    with (
        cluster(slow_tiny_model, *FLAGS, *ROOMY, prefill=0, forked=True) as running,
        ExitStack() as stack,
    ):
        flags = (*FLAGS, "--max-num-seqs", "1", *one_core(1))
        started = start_node("prefill", "prefill-0", slow_tiny_model, running, *flags, forked=True)
        process = stack.enter_context(started)
        running.prefill.append(Node("prefill-0", process, process.listening().url))
        eventually(lambda: len(http(running.url + "/instances").json()) == 2, "the prefill node is registered")
        # The first request makes the handshake, which is not what the tests are about.
        running.complete(SHORT, 2)
        yield running


def steps(node: Node) -> float:
    return node.metric("engine_steps_total")


def fetching(cluster: Cluster) -> float:
    return cluster.decode[0].metric("num_requests_waiting_for_remote_kvs")


def test_before_its_prefill_starts(nodes: Cluster) -> None:
    (prefill,) = nodes.prefill
    with closing(open_stream(nodes, LONG, max_tokens=2)) as other:
        eventually(lambda: prefill.metric("num_requests_running") == 1, "another prompt is computed")
        with closing(open_stream(nodes, LONG, max_tokens=2)):
            eventually(lambda: prefill.metric("num_requests_waiting") == 1, "it waits")
        eventually(lambda: prefill.metric("num_requests_waiting") == 0, "it waits no more")
        eventually(lambda: fetching(nodes) <= 1, "the decode node has its blocks back")
        while b"[DONE]" not in (received := other.recv(65536)):
            assert received, "the other one goes on to its end"
    nodes.until_idle()


def test_between_two_chunks(nodes: Cluster) -> None:
    (prefill,) = nodes.prefill
    before = steps(prefill)
    with closing(open_stream(nodes, LONG, max_tokens=2)):
        eventually(lambda: steps(prefill) > before, "some chunks are computed")
    nodes.until_idle()
    assert steps(prefill) - before < CHUNKS_OF_LONG


def test_after_its_prefill(nodes: Cluster) -> None:
    (decode,) = nodes.decode
    with closing(open_stream(nodes, SHORT, max_tokens=1500)) as stream:
        received = b""
        while received.count(b"data: ") < 3:
            received += stream.recv(4096)
        eventually(lambda: fetching(nodes) == 0, "all blocks have landed")
        assert decode.metric("num_requests_running") == 1
    nodes.until_idle()
    assert decode.metric("quarantined_blocks") == 0


def test_ten_that_are_cancelled_before_the_prefill_node_has_seen_them(nodes: Cluster) -> None:
    """The prefill node computes at most a chunk of one of them, and then the next request's prompt."""
    (prefill,), (decode,) = nodes.prefill, nodes.decode
    wanted = nodes.complete(SHORT, 3)
    nodes.until_idle()
    before, engine = steps(prefill), engine_pid(prefill)
    with ThreadPoolExecutor(1) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            with ExitStack() as clients:
                for _ in range(10):
                    clients.enter_context(closing(open_stream(nodes, ONE_OF_TEN, max_tokens=2)))
                eventually(lambda: fetching(nodes) == 10, "ten prompts are ordered")
            eventually(lambda: decode.idle, "the decode node does not wait for the prefill node to free its blocks")
            answer = pool.submit(nodes.complete, SHORT, 3)
            eventually(lambda: fetching(nodes) == 1, "the next one is ordered")
        finally:
            os.kill(engine, signal.SIGCONT)
        assert answer.result(60) == wanted
    nodes.until_idle()
    assert steps(prefill) - before <= 1 + CHUNKS_OF_SHORT


def test_ten_that_are_cancelled_while_they_are_computed(nodes: Cluster) -> None:
    (prefill,) = nodes.prefill
    wanted = nodes.complete(SHORT, 3)
    nodes.until_idle()
    before = steps(prefill)
    with ExitStack() as clients:
        for _ in range(10):
            clients.enter_context(closing(open_stream(nodes, ONE_OF_TEN, max_tokens=2)))
        eventually(lambda: prefill.metric("num_requests_waiting") > 0, "one is computed, others wait")
    assert nodes.complete(SHORT, 3) == wanted
    nodes.until_idle()
    # Some chunks of the first prompts were computed before their clients left; a test cannot tell how many.
    assert steps(prefill) - before < 5 * len(ONE_OF_TEN) / CHUNK
