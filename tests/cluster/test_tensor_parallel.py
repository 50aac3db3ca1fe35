"""Tests that P/D clusters with any numbers of tensor-parallel ranks give the tokens of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdserve_kvtransfer.pieces import head_map
from tests.cluster.nodes import Cluster, Node, http, start_node
from tests.eventually import eventually
from tests.processes import Process, end_together, pdserve
from tests.tiny_models import VOCAB_SIZE, Reference, save_tiny_chat_model

HEADS, KV_HEADS = 4, 2
NEW_TOKENS = 8
PROMPTS = [random.Random(length).choices(range(3, VOCAB_SIZE), k=length) for length in (37, 48, 100)]


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny model with the demo model's tokenizer."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"), **heads)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    reference = Reference(model, NEW_TOKENS)
    return [reference.answer(prompt) for prompt in PROMPTS]


MAPPED = [(2, 2), (2, 1), (1, 2), (4, 2), (2, 4)]
"""Ranks of the prefill and the decode node. In the last two pairs, one node has more ranks than there are KV heads."""
# As between GPUs, every rank's part of a block passes through host memory.
STAGED = ("--kv-staging", "on", "--kv-staging-mib", "1")
# As between hosts, no rank maps another node's memory.
NOT_MAPPED = ("--kv-shared-cache", "off")
FLAGS = ("--dtype", "fp32", "--kv-cache-mib", "8", "--max-step-tokens", "32", "--max-running", "8")


@contextmanager
def pairs(model: Path, wanted_pairs: Sequence[tuple[int, int]], *more: str) -> Iterator[dict[tuple[int, int], Cluster]]:
    """Yields a cluster with its own proxy for each pair. Pairs share nodes, which register with several proxies."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(pdserve("proxy", "--port", "0", "--control-port", "0")) for _ in wanted_pairs]
        made = {}
        for pair, proxy in zip(wanted_pairs, proxies, strict=True):
            found = proxy.listening()
            made[pair] = Cluster(found.url, proxy, found.control)
        starting: list[tuple[Process, list[list[Node]]]] = []
        for side, role in enumerate(("prefill", "decode")):
            for ranks in sorted({pair[side] for pair in wanted_pairs}):
                clusters = [made[pair] for pair in wanted_pairs if pair[side] == ranks]
                others = [flag for cluster in clusters[1:] for flag in ("--proxy", cluster.control)]
                flags = (*FLAGS, *more, "--tp", str(ranks), *others)
                process = stack.enter_context(start_node(role, f"{role}-of-{ranks}", model, clusters[0], *flags))
                starting.append((process, [[cluster.prefill, cluster.decode][side] for cluster in clusters]))
        for process, places in starting:
            for place in places:
                place.append(Node("", process, process.listening().url))
        for cluster in made.values():
            eventually(lambda: len(http(cluster.url + "/instances").json()) == 2, "both nodes registered")  # noqa: B023
        try:
            yield made
        finally:
            end_together([process for process, _ in starting])


def check(cluster: Cluster, wanted: list[list[int]], maps: int) -> None:
    """Checks the answers, that every prompt is prefilled remotely, and that ``maps`` pairs of ranks map memory."""
    (decode,) = cluster.decode
    fetched, mapped = decode.metric("prefills_total", source="remote"), maps_of(decode)
    assert [
        cluster.complete(prompt, NEW_TOKENS, ignore_eos=True, cache_salt=cluster.url) for prompt in PROMPTS
    ] == wanted
    cluster.until_idle()
    eventually(
        lambda: decode.metric("prefills_total", source="remote") == fetched + len(PROMPTS), "every prompt was fetched"
    )
    assert maps_of(decode) == mapped + maps


def maps_of(decode: Node) -> int:
    return decode.process.output.count("are copied out of its memory")


@pytest.fixture(scope="module")
def mapped(model: Path) -> Iterator[dict[tuple[int, int], Cluster]]:
    with pairs(model, MAPPED) as made:
        yield made


@pytest.mark.parametrize(("sources", "targets"), MAPPED)
def test_ranks_of_both_nodes_give_the_reference_tokens(
    mapped: dict[tuple[int, int], Cluster], wanted: list[list[int]], sources: int, targets: int
) -> None:
    # Each rank is linked with the ranks of the other node that have KV heads in common with it.
    check(mapped[sources, targets], wanted, len(set(head_map(KV_HEADS, sources, targets))))


@pytest.mark.parametrize("more", [STAGED, NOT_MAPPED], ids=["staged", "not mapped"])
def test_ranks_whose_memory_is_not_mapped_give_the_reference_tokens(
    model: Path, wanted: list[list[int]], more: tuple[str, ...]
) -> None:
    with pairs(model, [(2, 2)], *more) as made:
        check(made[2, 2], wanted, 0)
