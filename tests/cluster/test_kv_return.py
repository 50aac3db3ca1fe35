"""The blocks of answers go back to the prefill node: later turns find them there, and so does a node that goes on."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster, random_prompt
from tests.eventually import eventually

BLOCK = 16
# In bf16: its compiled kernels give the same bits in every batch.
FLAGS = ("--dtype", "bf16", "--kv-cache-mib", "64")


@pytest.fixture(scope="module")
def returning(slow_tiny_model: Path) -> Iterator[Cluster]:
    with cluster(slow_tiny_model, *FLAGS, decode=2, forked=True) as running:
        yield running


def returned(node: Node) -> float:
    return node.metric("kv_blocks_returned_total")


def test_the_blocks_of_an_answer_are_found_by_the_next_turn(returning: Cluster) -> None:
    (prefill,) = returning.prefill
    ids, before = random_prompt(40, seed=1), returned(prefill)
    answer = returning.complete(ids, 100, ignore_eos=True)
    # The last token of an answer is in no cache, and the prefill node has computed two blocks itself.
    wanted = (40 + 100 - 1) // BLOCK - 40 // BLOCK
    eventually(lambda: returned(prefill) - before == wanted, "the answer's blocks are at the prefill node")
    found = prefill.metric("prefix_cache_hits_total")
    turn = [*ids, *answer, *random_prompt(40, seed=2)]
    second = [returning.complete(turn, 4, ignore_eos=True) for _ in range(2)]
    assert second == [second[0]] * 2
    # At least one of two decode nodes did not generate the answer, and has asked for the whole prompt.
    assert prefill.metric("prefix_cache_hits_total") - found >= (40 + 100 - 1) // BLOCK * BLOCK
    found = prefill.metric("prefix_cache_hits_total")
    returning.complete(turn, 4, ignore_eos=True, cache_salt="another")
    assert prefill.metric("prefix_cache_hits_total") == found
    returning.until_idle()


def test_every_choice_is_returned(returning: Cluster) -> None:
    (prefill,) = returning.prefill
    before = returned(prefill)
    returning.complete(random_prompt(32, seed=3), 65, ignore_eos=True, n=2, seed=4, temperature=0.9)
    eventually(lambda: returned(prefill) - before == 2 * 4, "the blocks of both choices are at the prefill node")
    returning.until_idle()


def test_a_node_that_goes_on_takes_the_blocks_from_there(returning: Cluster) -> None:
    (prefill,) = returning.prefill
    ids = random_prompt(50, seed=5)
    body = {"model": MODEL, "prompt": ids, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    before = returned(prefill)
    whole = returning.complete(ids, 200, ignore_eos=True, cache_salt="unbroken")
    before += (50 + 200 - 1) // BLOCK - 50 // BLOCK
    eventually(lambda: returned(prefill) == before, "the unbroken answer's blocks are at the prefill node")
    data = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    request = urllib.request.Request(
        returning.url + "/v1/completions", data, {"content-type": "application/json", "x-request-id": "broken"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        eventually(lambda: returned(prefill) - before >= 4, "a part of the answer is at the prefill node")
        (decoding,) = [node for node in returning.decode if node.metric("num_requests_running")]
        os.kill(decoding.process.pid, signal.SIGKILL)
        events = [line[6:] for line in response if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == whole
    (other,) = [node for node in returning.decode if node is not decoding]
    assert "request_id=broken resumed" in returning.proxy.output
    wanted, reused = (other.metric(f"resume_blocks_{name}_total") for name in ("wanted", "reused"))
    # The prompt's three full blocks and those of the answer that were seen there; others may have come since.
    assert 3 + 4 <= reused <= wanted
    eventually(lambda: all(node.idle for node in (prefill, other)), "both nodes idle")
