"""Nodes that draft by the model's own layer, or by the text, beside nodes that do not: no answer says who drafted.

One cluster has them all, in every order: the layer's keys and values come from a node that has filled them in or left
them out, go back to such a node, and an answer goes on where it drafts otherwise. The tokens are those of transformers,
in fp32.

In every run, ``test_speculation.py`` has drafts by the text, and ``tests/engine/speculation`` those by the layer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import drafting_node
from tests.cluster.nodes import Cluster, Node, cluster, http, start_node
from tests.cluster.test_group_return import MANY, Stream, state_of
from tests.cluster.test_role_switch import command
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid, kill
from tests.models.tiny_drafting import answering_with, save_tiny_drafting
from tests.models.tiny_families import save_tiny
from tests.nightly import nightly
from tests.tiny_models import Reference, add_chat_tokenizer, random_prompt

FEW, SEEN = 24, 100
PROMPTS = [random_prompt(length, seed=length) for length in (5, 37, 60, 100)]
FLAGS = ("--dtype", "fp32", "--kv-cache-mib", "8", "--max-num-batched-tokens", "32", "--max-num-seqs", "16")
OFF = ("--speculation", "off")
BY_LAYER = ("--speculation", "mtp", "--draft-tokens", "3", "--tensor-parallel-size", "2")
BY_BOTH = ("--speculation", "auto", "--draft-tokens", "5")
BY_TEXT = ("--speculation", "ngram", "--draft-tokens", "4")
PLAIN_HYBRIDS = ("falcon-h1", "lfm2-moe", "nemotron-h")
"""Models with states and without a layer that drafts: nodes guess by the text alone."""


def accepted(node: Node) -> float:
    return node.metric("spec_decode_num_accepted_tokens_total")


@dataclass
class Mixed:
    """A running cluster, and what transformers answers to each of the prompts."""

    running: Cluster
    model: Path
    stack: ExitStack
    wanted: Sequence[list[int]]
    asked: int = 0

    def start(self, name: str, *flags: str) -> Node:
        """Starts a decode node, and returns it when the proxy knows it."""
        started = start_node("decode", name, self.model, self.running, *FLAGS, *flags, module=drafting_node.MODULE)
        process = self.stack.enter_context(started)
        node = Node(name, process, process.listening().url)
        self.running.decode.append(node)
        eventually(lambda: node.url in {known["url"] for known in http(self.running.url + "/instances").json()})
        return node

    def ask(self, nodes: Sequence[Node], *, drafting: Sequence[Node] = ()) -> None:
        """Asks until each of the nodes has answered a prompt that another node has computed.

        Those that are ``drafting`` have also guessed a token of such an answer.
        """
        fetched = {node.name: node.metric("prefills_total", source="remote") for node in nodes}

        def all_have_answered() -> bool:
            self.asked += 1
            pairs = list(zip(PROMPTS, self.wanted, strict=True))
            # Each node gets each prompt at some time: the first tokens of some answers repeat nothing.
            first = self.asked % len(pairs)
            for prompt, answer in pairs[first:] + pairs[:first]:
                found = self.running.complete(prompt, FEW, ignore_eos=True, cache_salt=str(self.asked))
                assert found == answer[:FEW]
            have = all(node.metric("prefills_total", source="remote") > fetched[node.name] for node in nodes)
            return have and all(map(accepted, drafting))

        eventually(all_have_answered, "each node has answered")

    @contextmanager
    def answering_at(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Stops what decodes while the node answers; yields it and the other one. Then the answers are whole."""
        streams: list[tuple[Stream, list[int]]] = []
        # Where one has begun, the next one is elsewhere.
        for prompt, answer in zip(PROMPTS, self.wanted, strict=True):
            self.asked += 1
            streams.append((Stream(self.running, f"stream-{self.asked}", prompt), answer))
            streams[-1][0].read(1)
            if streams[-1][0].node() is node:
                break
        stream, _ = streams[-1]
        stream.read(SEEN)
        with stream.held() as (own, other):
            assert own is node
            yield own, other
        for stream, answer in streams:
            assert stream.read(MANY) == answer
        for nodes in (self.running.prefill, self.running.decode):
            nodes[:] = [each for each in nodes if each is not node]

    def next_turns(self) -> None:
        """Asks for the rest of each answer, of which blocks are found in the cache."""
        before = [node.metric("prefix_cache_hits_total") for node in self.running.decode]
        for prompt, answer in zip(PROMPTS, self.wanted, strict=True):
            assert self.running.complete([*prompt, *answer[:SEEN]], FEW, ignore_eos=True) == answer[SEEN:][:FEW]
        after = [node.metric("prefix_cache_hits_total") for node in self.running.decode]
        assert after > before

    def role(self, node: Node, role: str) -> None:
        assert command(self.running, "role", node.name, role) == 0


@pytest.mark.parametrize(
    "case",
    [
        "deepseek-v3",
        *(nightly(case) for case in ("deepseek-v32", "qwen3-next", "qwen3-5", *PLAIN_HYBRIDS)),
    ],
)
def test_nobody_can_tell_on_which_side_the_layer_drafts(demo_model: Path, tmp_path: Path, case: str) -> None:
    save, first_flags = (save_tiny, BY_TEXT) if case in PLAIN_HYBRIDS else (save_tiny_drafting, BY_LAYER)
    folder = answering_with(save(case, tmp_path, tie_word_embeddings=False), range(100, 103))
    model = add_chat_tokenizer(demo_model, folder)
    reference = Reference(model, MANY)
    wanted = [reference.answer(prompt) for prompt in PROMPTS]
    with cluster(model, *FLAGS, *OFF, decode=0) as running, ExitStack() as stack:
        mixed = Mixed(running, model, stack, wanted)
        (plain,) = running.prefill
        layer, both = mixed.start("layer", *first_flags), mixed.start("both", *BY_BOTH)
        mixed.ask([layer, both], drafting=[layer, both])

        # Now the one without drafts decodes what one with drafts has computed.
        mixed.role(plain, "decode")
        mixed.role(layer, "prefill")
        mixed.ask([plain, both])
        assert plain.metric("spec_decode_num_draft_tokens_total") == 0

        with mixed.answering_at(both) as (lost, other):
            assert other is plain
            kill(lost)

        # The other way round, with the blocks of the answer that the prefill node has got back.
        eventually(lambda: layer.metric("kv_blocks_returned_total"), "blocks of answers have come back")
        mixed.role(layer, "mixed")
        before = accepted(layer)
        with mixed.answering_at(plain) as (lost, other):
            assert other is layer
            kill(lost)
        eventually(lambda: accepted(layer) > before, "drafts of the answer that went on are accepted, and counted")
        mixed.next_turns()

        after = mixed.start("after", *BY_TEXT)
        with mixed.answering_at(layer) as (leaving, other):
            assert other is after
            leaving.process.terminate()
            eventually(lambda: state_of(running, leaving) == "draining", "the node drains")
            # What its own engine has left of an answer may take it less time than the move.
            os.kill(engine_pid(after), signal.SIGCONT)
            eventually(lambda: " moved " in running.proxy.output, "the answer moves")
        assert leaving.process.wait() == 0
        eventually(lambda: after.idle, "the last node is idle")
