"""Answers of models with cache groups: what they have of windows and states comes back, and goes on elsewhere.

The tokens are those of answers that nobody has a part of.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster, group_samples, http
from tests.cluster.test_role_switch import Clients, command, roles, under_load
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid, kill
from tests.models.tiny_families import save_tiny_chat_family
from tests.tiny_models import random_prompt

FLAGS = ("--dtype", "fp32", "--kv-cache-mib", "64")
FEW, MANY = 100, 400
"""A node is lost after the few tokens of an answer, of which the prefill node has the first ones by then."""
STREAMS = 12


class Stream:
    """An answer of ``MANY`` tokens that comes token by token."""

    def __init__(self, running: Cluster, label: str, prompt: list[int], **more: object) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": MANY, "ignore_eos": True, "temperature": 0}
        data = json.dumps({**body, "stream": True, "return_token_ids": True, **more}).encode()
        headers = {"content-type": "application/json", "x-request-id": label}
        request = urllib.request.Request(running.url + "/v1/completions", data, headers)
        self._running, self._label = running, label
        self._response: HTTPResponse = urllib.request.urlopen(request, timeout=120)
        self._tokens: list[int] = []

    def read(self, least: int) -> list[int]:
        """Returns the tokens so far when there are ``least`` of them, or all if there are fewer."""
        while len(self._tokens) < least and (line := self._response.readline()):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    self._tokens += choice.get("token_ids") or ()
        return self._tokens

    def node(self) -> Node:
        """Returns the node that answers."""
        return self._running.answering(self._label)

    @contextmanager
    def held(self) -> Iterator[tuple[Node, Node]]:
        """Stops what decodes meanwhile, so that the answer does not end. Yields its node, and the other one."""
        decoding = [node for node in self._running.nodes if roles(self._running)[node.name] != "prefill"]
        engines = [engine_pid(node) for node in decoding]
        for engine in engines:
            os.kill(engine, signal.SIGSTOP)
        try:
            own = self.node()
            (other,) = (node for node in decoding if node is not own)
            yield own, other
        finally:
            for node, engine in zip(decoding, engines, strict=True):
                if node.process.popen.poll() is None:
                    os.kill(engine, signal.SIGCONT)


def next_turns_are_the_same(running: Cluster) -> None:
    (prefill,) = running.prefill
    first = random_prompt(40, 1)
    answer = running.complete(first, 100, ignore_eos=True)
    eventually(lambda: prefill.metric("kv_blocks_returned_total"), "blocks of the answer are at the prefill node")
    running.until_idle()
    found = prefill.metric("prefix_cache_hits_total")
    turn = [*first, *answer, *random_prompt(40, 2)]
    found_there = [running.complete(turn, 20, ignore_eos=True) for _ in range(2)]
    assert prefill.metric("prefix_cache_hits_total") - found > len(first)
    assert found_there == [running.complete(turn, 20, ignore_eos=True, cache_salt="another")] * 2


def has_answered(clients: Clients, count: int) -> bool:
    return clients.answered >= count


def nodes_change_their_roles(running: Cluster) -> None:
    changes = [("decode-1", "prefill"), ("prefill-0", "decode"), ("prefill-0", "prefill"), ("decode-1", "decode")]
    with under_load(running) as clients:
        for node, role in changes:
            assert command(running, "role", node, role) == 0
            eventually(partial(has_answered, clients, clients.answered + 8), "requests are answered")
    running.until_idle()


def a_lost_node_is_missed_by_nobody(running: Cluster) -> None:
    prompt = random_prompt(50, 5)
    whole = running.complete(prompt, MANY, ignore_eos=True, cache_salt="unbroken")
    stream = Stream(running, "broken", prompt)
    stream.read(FEW)
    with stream.held() as (lost, other):
        kill(lost)
    assert stream.read(MANY) == whole
    assert "request_id=broken resumed" in running.proxy.output
    assert other.metric("resume_blocks_reused_total") >= 1
    running.decode.remove(lost)
    running.until_idle()


def state_of(running: Cluster, node: Node) -> str:
    states: dict[str, str] = {known["name"]: known["state"] for known in http(running.url + "/instances").json()}
    return states[node.name]


def a_node_that_drains_passes_its_answer_on(running: Cluster) -> None:
    """The prefill node decodes, too, as the other one is the last that does."""
    assert command(running, "role", "prefill-0", "mixed") == 0
    prompt = random_prompt(50, 6)
    whole = running.complete(prompt, MANY, ignore_eos=True, cache_salt="unbroken")
    stream = Stream(running, "passed", prompt)
    stream.read(FEW)
    with stream.held() as (leaving, _):
        leaving.process.terminate()
        eventually(lambda: state_of(running, leaving) == "draining", "the node drains")
    assert stream.read(MANY) == whole
    assert leaving.process.wait() == 0
    assert "request_id=passed moved" in running.proxy.output
    (running.prefill if leaving in running.prefill else running.decode).remove(leaving)
    running.until_idle()


@pytest.mark.parametrize(
    "case",
    [
        "qwen3-next",
        *(
            pytest.param(case, marks=pytest.mark.nightly)
            for case in (
                *("cohere2", "gemma2", "gemma4-shared", "gpt-oss", "llama4"),
                *("falcon-h1", "granitemoehybrid", "jamba", "lfm2-moe", "mamba2", "nemotron-h", "qwen3-5"),
            )
        ),
    ],
)
def test_what_windows_and_states_have_is_returned_and_goes_on_elsewhere(
    demo_model: Path, tmp_path: Path, case: str
) -> None:
    model = save_tiny_chat_family(demo_model, case, tmp_path)
    with cluster(model, *FLAGS, decode=2) as running:
        assert all(group_samples(node.url, "cache_group_free_blocks") for node in running.nodes)
        next_turns_are_the_same(running)
        nodes_change_their_roles(running)
        a_lost_node_is_missed_by_nobody(running)
        a_node_that_drains_passes_its_answer_on(running)


@pytest.mark.nightly
def test_answers_with_states_that_find_no_blocks_go_on_later_as_they_were(demo_model: Path, tmp_path: Path) -> None:
    model = save_tiny_chat_family(demo_model, "qwen3-next", tmp_path)
    with cluster(
        model, *FLAGS[:2], "--kv-cache-mib", "1", "--max-num-seqs", "16", prefill=0, decode=0, mixed=1
    ) as made:
        (node,) = made.nodes
        prompts = [random_prompt(40, 100 + number) for number in range(STREAMS)]
        alone = [made.complete(prompt, MANY, ignore_eos=True) for prompt in prompts]
        with ThreadPoolExecutor(STREAMS) as pool:
            salted = [
                pool.submit(made.complete, prompt, MANY, ignore_eos=True, cache_salt="together") for prompt in prompts
            ]
            assert [answer.result() for answer in salted] == alone
        assert node.metric("num_preemptions_total") >= 1
        made.until_idle()
