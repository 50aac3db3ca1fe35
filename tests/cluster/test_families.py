"""Tests that P/D clusters serve families of unlike parts with the tokens of transformers, in fp32.

The prefill node has one rank, and of the decode nodes one has one and one has two. Both answer, and then one is lost.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from gguf import GGUFWriter

from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.model_files import packaged_gguf
from tests.cluster.nodes import Node, cluster, http, start_node
from tests.cluster.test_group_return import MANY, Stream
from tests.eventually import eventually
from tests.faults.test_node_death import kill
from tests.models import test_composites, tiny_families
from tests.models.converted_gguf import save_converted
from tests.models.tiny_families import case_of_each_family, save_case
from tests.tiny_models import Reference, add_chat_tokenizer, random_prompt

FEW = 8
PROMPTS = [random_prompt(length, seed=length) for length in (5, 37, 100)]
FLAGS = ("--dtype", "fp32", "--kv-cache-mib", "8", "--max-num-batched-tokens", "32", "--max-num-seqs", "8")
CASES = (
    "deepseek-v3",
    "deepseek-v32",
    "deepseek-v4",
    "glm4-moe",
    "cohere2",
    "falcon-h1",
    "gemma2",
    "gemma4-shared",
    "gpt-oss",
    "gpt2",
    "jamba",
    "kimi-linear",
    "lfm2-moe",
    "llama4",
    "mamba2",
    "nemotron-h",
    "olmo3",
    "qwen3-next",
)
"""Norms before, beside, behind and around the parts; windows by layer; fused, transposed and permuted weights; biases;
experts, and one that every token is sent to; latents, which each rank has whole, and of which tokens choose some; one
vector for all heads, and entries that a state is made into; learned positions; bounded scores; chunks; layers with
other heads, or with the keys and values of earlier ones; sinks; states in place of attention, beside it, beside latents
and alone; layers of one part."""


FILES = {"qwen3-5": "qwen35"}
"""The cases that are served from a GGUF file, and its architecture: value heads are in another order there."""
SERVED = {tiny_families.CASES[case][0] for case in (*CASES, *FILES)}
TEXT_PARTS = ("glm5-next", "hy4-vl", "mllama")
"""Text parts of composite models, of kinds that no family is."""
EVERY = (
    *CASES,
    *TEXT_PARTS,
    *FILES,
    *(case for family, case in sorted(case_of_each_family().items()) if family not in SERVED),
)


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


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.nightly) for case in EVERY])
def test_unlike_ranks_and_a_lost_node_give_the_tokens_of_transformers(
    demo_model: Path, tmp_path: Path, case: str
) -> None:
    saved = test_composites.save(case, tmp_path) if case in TEXT_PARTS else save_case(case, tmp_path)
    model = add_chat_tokenizer(demo_model, saved)
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
        stream = Stream(running, "lost", PROMPTS[1], cache_salt="stream")
        stream.read(1)
        with stream.held() as (lost, other):
            kill(lost)
        assert stream.read(MANY) == wanted[1]
        assert " resumed from=" in running.proxy.output
        eventually(lambda: other.idle, "the node that is left is idle")
