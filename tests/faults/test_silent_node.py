"""Tests that requests do not wait for a serving node that hangs like one whose host has vanished.

In every run, cells of ``tests/faults/matrix`` stop the node or the engine of a stream.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.nodes import EARLY_LOSS, Cluster, Node, cluster
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid
from tests.processes import alive

PROMPT = [11 + i % 400 for i in range(64)]
NEW_TOKENS = 320
"""So many that an answer is not over before a test has seen which node serves it, and stopped that."""
PROXY_GIVES_UP_S = 600.0
"""The seconds after which the proxy ends a request by default. The tests take far less."""


@pytest.fixture(scope="module")
def pair(slow_tiny_model: Path) -> Iterator[Cluster]:
    """Yields two nodes, each of which serves its requests alone. In bf16 both compute the same bits."""
    flags = ("--dtype", "bf16", "--max-model-len", "512", "--disaggregation", "never", "--engine-silence-ms", "2000")
    with cluster(slow_tiny_model, *flags, prefill=0, decode=0, mixed=2, proxy_flags=EARLY_LOSS) as running:
        yield running


def serving(running: Cluster) -> Node:
    """Returns the node that serves the only request."""

    def busy() -> Node | None:
        return next((node for node in running.nodes if node.metric("num_requests_running") > 0), None)

    return eventually(busy, "a node works on it")


@contextmanager
def standing_still(node: Node) -> Iterator[None]:
    """Stops the node's API process, so that it sends no heartbeats and no answers."""
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.process.pid, signal.SIGCONT)


@pytest.mark.nightly
def test_an_answer_in_one_piece_comes_from_the_other_node(pair: Cluster) -> None:
    expected = pair.complete(PROMPT, NEW_TOKENS, ignore_eos=True)
    # A node's metrics still have a request for a moment after its answer: the wrong node would be taken for serving.
    pair.until_idle()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.complete, PROMPT, NEW_TOKENS, ignore_eos=True)
        with standing_still(serving(pair)):
            assert not answer.done()
            assert answer.result(PROXY_GIVES_UP_S / 10) == expected
    eventually(lambda: pair.proxy.output.count("no heartbeat") == 1, "the node was dropped")
    pair.until_idle()


@pytest.mark.nightly
def test_answers_of_a_stopped_engine_come_from_the_other_node(pair: Cluster) -> None:
    """The node's API process lives: nothing but the engine's own silence tells that it hangs."""
    expected = pair.complete(PROMPT, NEW_TOKENS, ignore_eos=True)
    pair.until_idle()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.complete, PROMPT, NEW_TOKENS, ignore_eos=True)
        node = serving(pair)
        engine = engine_pid(node)
        os.kill(engine, signal.SIGSTOP)
        assert not answer.done()
        assert answer.result(PROXY_GIVES_UP_S / 10) == expected
    assert node.process.wait() == 1
    assert "the engine's step loop hangs: no sign of life for 2.0 s" in node.process.output
    assert not alive(engine)
