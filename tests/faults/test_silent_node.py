"""Tests that requests do not wait for a serving node that hangs like one whose host has vanished."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster
from tests.eventually import eventually

PROMPT = [11 + i % 400 for i in range(64)]
NEW_TOKENS = 320
"""So many that an answer is not over before a test has seen which node serves it, and stopped that."""
PROXY_GIVES_UP_S = 600.0
"""The seconds after which the proxy ends a request by default. The tests take far less."""


@pytest.fixture(scope="module")
def pair(slow_tiny_model: Path) -> Iterator[Cluster]:
    """Yields two nodes, each of which serves its requests alone. In bf16 both compute the same bits."""
    flags = ("--dtype", "bf16", "--max-model-len", "512", "--disaggregation", "never")
    with cluster(slow_tiny_model, *flags, prefill=0, decode=0, mixed=2) as running:
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


def test_a_stream_goes_on_at_the_other_node(pair: Cluster) -> None:
    unbroken, before = streamed(pair, nullcontext), pair.proxy.output.count(" resumed from=")
    assert streamed(pair, lambda: standing_still(serving(pair))) == unbroken
    eventually(lambda: pair.proxy.output.count(" resumed from=") == before + 1, "the proxy says so")
    pair.until_idle()


def streamed(running: Cluster, within: Callable[[], AbstractContextManager[None]]) -> tuple[str, int]:
    """Returns the text of a sampled stream and its count of tokens. All but its first line is read in ``within``."""
    options = {"seed": 7, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NEW_TOKENS, **options}
    request = urllib.request.Request(
        running.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PROXY_GIVES_UP_S / 10) as stream:
        first = stream.readline()
        with within():
            rest = stream.read()
    *chunks, done = (first + rest).decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    *parts, usage = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert len({part["id"] for part in parts}) == 1
    choices = [part["choices"][0] for part in parts]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return "".join(choice["text"] for choice in choices), usage["usage"]["completion_tokens"]
