"""Answers of models with cache groups: what they have of windows and states comes back, and goes on elsewhere.

The tokens are those of answers that nobody has a part of.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, cluster, http
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid, kill
from tests.models.tiny_families import save_tiny
from tests.tiny_models import VOCAB_SIZE, WINDOW

CASES = {"gemma2": f"window {WINDOW}", "qwen3-next": "state"}
"""The cache group of each that is no whole contexts."""
FLAGS = ("--dtype", "fp32", "--kv-cache-mib", "64")
FEW, MANY = 100, 400
"""A node is lost after the few tokens of an answer, of which the prefill node has the first ones by then."""


def random_tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def read(response: HTTPResponse, tokens: list[int], least: int) -> None:
    """Reads until there are ``least`` tokens, or to the end if there are fewer."""
    while len(tokens) < least and (line := response.readline()):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice.get("token_ids") or ()


def next_turns_are_the_same(running: Cluster) -> None:
    (prefill,) = running.prefill
    first = random_tokens(40, 1)
    answer = running.complete(first, 100, ignore_eos=True)
    eventually(lambda: prefill.metric("kv_blocks_returned_total"), "blocks of the answer are at the prefill node")
    running.until_idle()
    found = prefill.metric("prefix_cache_hits_total")
    turn = [*first, *answer, *random_tokens(40, 2)]
    found_there = [running.complete(turn, 20, ignore_eos=True) for _ in range(2)]
    assert prefill.metric("prefix_cache_hits_total") - found > len(first)
    assert found_there == [running.complete(turn, 20, ignore_eos=True, cache_salt="another")] * 2


def a_lost_node_is_missed_by_nobody(running: Cluster, group: str) -> None:
    (prefill,) = running.prefill
    prompt = random_tokens(50, 5)
    whole = running.complete(prompt, MANY, ignore_eos=True, cache_salt="unbroken")
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MANY, "ignore_eos": True, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        running.url + "/v1/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"content-type": "application/json", "x-request-id": "broken"},
    )
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=120) as response:
        read(response, tokens, FEW)
        # While they are stopped, the answer does not end before its node is found and killed.
        engines = {node.name: engine_pid(node) for node in running.decode}
        for engine in engines.values():
            os.kill(engine, signal.SIGSTOP)
        proxy, *_ = http(f"{running.url}/requests/broken/timeline").json()["lanes"]
        (name,) = (phase["node"] for phase in proxy["phases"] if phase["kind"] == "attempt")
        (decoding,) = [node for node in running.decode if node.name == name]
        (other,) = [node for node in running.decode if node is not decoding]
        kill(decoding)
        os.kill(engines[other.name], signal.SIGCONT)
        read(response, tokens, MANY)
    assert tokens == whole
    assert "request_id=broken resumed" in running.proxy.output
    assert other.metric("resume_blocks_reused_total") >= 1
    eventually(lambda: all(node.idle for node in (prefill, other)), "both nodes idle")
    names = ("cache_group_blocks", "cache_group_free_blocks")
    figures = [[node.metric(name, group=group) for name in names] for node in (prefill, other)]
    assert all(blocks and blocks == free for blocks, free in figures), figures


@pytest.mark.parametrize("case", CASES)
def test_what_windows_and_states_have_is_returned_and_goes_on_elsewhere(
    demo_model: Path, tmp_path: Path, case: str
) -> None:
    model = save_tiny(case, tmp_path)
    for path in (*demo_model.glob("*token*.json"), *demo_model.glob("chat_template*")):
        shutil.copy(path, model)
    with cluster(model, *FLAGS, decode=2) as running:
        next_turns_are_the_same(running)
        a_lost_node_is_missed_by_nobody(running, CASES[case])
