"""Tests that requests do not wait for a serving node that hangs like one whose host has vanished."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster
from tests.eventually import eventually

PROMPT = [11 + i % 400 for i in range(64)]
NEW_TOKENS = 160
PROXY_GIVES_UP_S = 600.0
"""The seconds after which the proxy ends a request by default. The tests take far less."""


@pytest.fixture(scope="module")
def pair(slow_tiny_model: Path) -> Iterator[Cluster]:
    """Yields two nodes, each of which can serve a request alone."""
    with cluster(slow_tiny_model, "--dtype", "fp32", "--max-model-len", "512", prefill=0, decode=0, mixed=2) as running:
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


def test_an_answer_in_one_piece_comes_from_the_other_node(pair: Cluster) -> None:
    expected = pair.complete(PROMPT, NEW_TOKENS, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(pair.complete, PROMPT, NEW_TOKENS, ignore_eos=True)
        with standing_still(serving(pair)):
            assert not answer.done()
            assert answer.result(PROXY_GIVES_UP_S / 10) == expected
    eventually(lambda: pair.proxy.output.count("no heartbeat") == 1, "the node was dropped")
    pair.until_idle()


def test_a_stream_ends_with_an_error_event(pair: Cluster) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        pair.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PROXY_GIVES_UP_S / 10) as stream:
        first = stream.readline()
        with standing_still(serving(pair)):
            rest = stream.read()
    lines = (first + rest).splitlines()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: ")]
    assert "error" not in events[0]
    assert events[-1]["error"]["code"] == "upstream_lost"
    pair.until_idle()
