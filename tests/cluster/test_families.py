"""Tests that P/D clusters serve families of unlike parts with the tokens of transformers, in fp32.

The prefill node has one rank, and of the decode nodes one has one and one has two. Both answer, and then one is lost.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import pytest
from gguf import GGUFWriter

from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.model_files import packaged_gguf
from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http, start_node
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid, kill
from tests.models.converted_gguf import save_converted
from tests.models.tiny_drafting import save_tiny_drafting
from tests.models.tiny_families import add_chat_tokenizer, save_tiny
from tests.tiny_models import Reference, random_prompt

FEW, MANY = 8, 400
PROMPTS = [random_prompt(length, seed=length) for length in (5, 37, 100)]
FLAGS = ("--dtype", "fp32", "--kv-cache-mib", "8", "--max-num-batched-tokens", "32", "--max-num-seqs", "8")
CASES = (
    "deepseek-v3",
    "glm4-moe",
    "cohere2",
    "falcon-h1",
    "gemma2",
    "gemma4-shared",
    "gpt-oss",
    "gpt2",
    "jamba",
    "lfm2-moe",
    "llama4",
    "mamba2",
    "nemotron-h",
    "olmo3",
    "qwen3-next",
)
"""Norms before, beside, behind and around the parts; windows by layer; fused, transposed and permuted weights; biases;
experts, and one that every token is sent to; latents, which each rank has whole; learned positions; bounded scores;
chunks; layers with other heads, or with the keys and values of earlier ones; sinks; states in place of attention,
beside it and alone; layers of one part."""


DRAFTS = "drafts"
"""With this behind its name, a case has a layer that drafts tokens, whose keys and values move with the others."""
FILES = {"qwen3-5": "qwen35"}
"""The cases that are served from a GGUF file, and its architecture: value heads are in another order there."""


def add_tokenizer(writer: GGUFWriter) -> None:
    """Adds the demo model's, as other cases have it."""
    found = read_gguf(packaged_gguf()).metadata
    writer.add_tokenizer_model(str(found["tokenizer.ggml.model"]))
    writer.add_tokenizer_pre(str(found["tokenizer.ggml.pre"]))
    for name in ("tokens", "merges", "token_type"):
        key = f"tokenizer.ggml.{name}"
        values = found[key]
        assert isinstance(values, list)
        writer.add_array(key, values)


class Stream:
    """An answer that comes token by token."""

    def __init__(self, running: Cluster, prompt: list[int]) -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": MANY, "temperature": 0, "ignore_eos": True}
        data = json.dumps({**body, "stream": True, "return_token_ids": True, "cache_salt": "stream"}).encode()
        self._running, self._label = running, f"prompt-of-{len(prompt)}"
        headers = {"content-type": "application/json", "x-request-id": self._label}
        request = urllib.request.Request(running.url + "/v1/completions", data, headers)
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
        proxy, *_ = http(f"{self._running.url}/requests/{self._label}/timeline").json()["lanes"]
        (name,) = (phase["node"] for phase in proxy["phases"] if phase["kind"] == "attempt")
        return next(node for node in self._running.decode if node.name == name)


@pytest.mark.parametrize(
    "case",
    [f"{CASES[0]} {DRAFTS}"]
    + [pytest.param(case, marks=pytest.mark.nightly) for case in (*CASES, f"qwen3-next {DRAFTS}", *FILES)],
)
def test_unlike_ranks_and_a_lost_node_give_the_tokens_of_transformers(
    demo_model: Path, tmp_path: Path, case: str
) -> None:
    family, _, drafts = case.partition(" ")
    save = save_tiny_drafting if drafts else save_tiny
    model = add_chat_tokenizer(demo_model, save(family, tmp_path))
    reference = Reference(model, MANY)
    wanted = [reference.answer(prompt) for prompt in PROMPTS]
    if case in FILES:
        model = save_converted(model, tmp_path / "tiny.gguf", FILES[case], add_tokenizer)
    with ExitStack() as stack:
        running = stack.enter_context(cluster(model, *FLAGS))
        flags = (*FLAGS, "--tensor-parallel-size", "2")
        process = stack.enter_context(start_node("decode", "two-ranks", model, running, *flags))
        running.decode.append(Node("two-ranks", process, process.listening().url))
        eventually(lambda: len(http(running.url + "/instances").json()) == 3, "all nodes registered")
        turn = 0

        def all_have_fetched() -> bool:
            nonlocal turn
            turn += 1
            for prompt, answer in zip(PROMPTS, wanted, strict=True):
                assert running.complete(prompt, FEW, ignore_eos=True, cache_salt=str(turn)) == answer[:FEW]
            return all(node.metric("prefills_total", source="remote") for node in running.decode)

        eventually(all_have_fetched, "each decode node had a prompt prefilled remotely")
        engines = {node.name: engine_pid(node) for node in running.decode}
        stream = Stream(running, PROMPTS[1])
        stream.read(1)
        # While they are stopped, the answer does not end before its node is found and killed.
        for engine in engines.values():
            os.kill(engine, signal.SIGSTOP)
        lost = stream.node()
        (other,) = [node for node in running.decode if node is not lost]
        kill(lost)
        os.kill(engines[other.name], signal.SIGCONT)
        assert stream.read(MANY) == wanted[1]
        assert " resumed from=" in running.proxy.output
        eventually(lambda: other.idle, "the node that is left is idle")
        assert not drafts or other.metric("spec_decode_num_draft_tokens_total") > 0
