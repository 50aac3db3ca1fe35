"""P/D clusters whose nodes have any numbers of tensor-parallel ranks give the tokens of transformers."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdserve_kvtransfer.head_map import head_map
from tests.cluster.nodes import Cluster, Node, http, start_node
from tests.eventually import eventually
from tests.processes import pdserve
from tests.tiny_models import VOCAB_SIZE, Reference, save_tiny_chat_model

HEADS, KV_HEADS = 4, 2
NEW_TOKENS = 8
PROMPTS = [random.Random(length).choices(range(3, VOCAB_SIZE), k=length) for length in (37, 48, 100)]


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo model's tokenizer."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"), **heads)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    reference = Reference(model, NEW_TOKENS)
    return [reference.answer(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("sources", "targets", "more"),
    [
        (2, 2, ()),
        (2, 1, ()),
        (1, 2, ()),
        # More ranks than KV heads, on either side.
        (4, 2, ()),
        (2, 4, ()),
        # As between GPUs: every rank's part of a block passes through host memory.
        (2, 2, ("--kv-staging", "on", "--kv-staging-mib", "1")),
        # As between hosts: no rank maps another node's memory.
        (2, 2, ("--kv-shared-cache", "off")),
    ],
)
def test_ranks_of_both_nodes_give_the_reference_tokens(
    model: Path, wanted: list[list[int]], sources: int, targets: int, more: tuple[str, ...]
) -> None:
    flags = ("--dtype", "fp32", "--kv-cache-mib", "8", "--max-step-tokens", "32", "--max-running", "8", *more)
    with ExitStack() as stack:
        proxy = stack.enter_context(pdserve("proxy", "--port", "0", "--control-port", "0"))
        found = proxy.listening()
        cluster = Cluster(found.url, proxy, found.control)
        for role, ranks, nodes in (("prefill", sources, cluster.prefill), ("decode", targets, cluster.decode)):
            process = stack.enter_context(start_node(role, role, model, cluster, *flags, "--tp", str(ranks)))
            nodes.append(Node(role, process, process.listening().url))
        eventually(lambda: len(http(cluster.url + "/instances").json()) == 2, "every node registered")
        got = [cluster.complete(prompt, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        assert got == wanted
        cluster.until_idle()
        decode = cluster.decode[0]
        eventually(lambda: decode.metric("prefills_total", source="remote") == len(PROMPTS), "every prompt was fetched")
        # The ranks of both nodes that have KV heads in common are linked.
        maps = len(set(head_map(KV_HEADS, sources, targets))) if not more else 0
        assert decode.process.output.count("are copied out of its memory") == maps
