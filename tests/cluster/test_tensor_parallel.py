"""Tests that P/D clusters with any numbers of tensor-parallel ranks give the tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from pdserve_kvtransfer.pieces import head_map
from tests.cluster.nodes import Cluster, Node, http, start_node, start_proxy
from tests.eventually import eventually
from tests.processes import Process, end_together
from tests.tiny_models import Reference, random_prompt, save_tiny_chat_model

HEADS, KV_HEADS = 4, 2
NEW_TOKENS = 8
PROMPTS = [random_prompt(length, seed=length) for length in (37, 48, 100)]


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny model with the demo model's tokenizer."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"), **heads)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    reference = Reference(model, NEW_TOKENS)
    return [reference.answer(prompt) for prompt in PROMPTS]


MAPPED = [(2, 2), (2, 1), (1, 2)]
"""Ranks of the prefill and the decode node."""
MORE_RANKS = [(4, 2), (2, 4)]
"""A node has more ranks than there are KV heads. In every run, ``tests/kvtransfer/test_ranks.py`` moves such blocks."""
# As between GPUs, every rank's part of a block passes through host memory.
STAGED = ("--kv-staging", "on", "--kv-staging-mib", "1")
# As between hosts, no rank maps another node's memory: a prefill node decides that alone.
NOT_MAPPED = ("--kv-shared-cache", "off")
FLAGS = ("--dtype", "fp32", "--kv-cache-mib", "8", "--max-num-batched-tokens", "32", "--max-num-seqs", "8")

Ranks: TypeAlias = tuple[int, tuple[str, ...]]
"""A node's number of ranks, and its flags besides ``FLAGS``."""
Pair: TypeAlias = tuple[Ranks, Ranks]
"""A prefill and a decode node."""


@contextmanager
def clusters(model: Path, pairs: Sequence[Pair]) -> Iterator[dict[Pair, Cluster]]:
    """Yields a cluster with its own proxy for each pair. Pairs share nodes, which register with several proxies."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(start_proxy(forked=True)) for _ in pairs]
        made = {}
        for pair, proxy in zip(pairs, proxies, strict=True):
            found = proxy.listening()
            made[pair] = Cluster(found.url, proxy, found.control)
        starting: list[tuple[Process, list[list[Node]]]] = []
        for side, role in enumerate(("prefill", "decode")):
            for ranks, more in sorted({pair[side] for pair in pairs}):
                joined = [made[pair] for pair in pairs if pair[side] == (ranks, more)]
                others = [flag for cluster in joined[1:] for flag in ("--proxy", cluster.control)]
                flags = (*FLAGS, *more, "--tensor-parallel-size", str(ranks), *others)
                started = start_node(role, f"{role}-of-{ranks}", model, joined[0], *flags, forked=True)
                process = stack.enter_context(started)
                starting.append((process, [[cluster.prefill, cluster.decode][side] for cluster in joined]))
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
    """Checks the answers, that every prompt is prefilled remotely, and that ``maps`` pairs of ranks map memory.

    Links to all nodes that the decode node fetches from were made before any prompt.
    """
    (decode,) = cluster.decode
    fetched = decode.metric("prefills_total", source="remote")
    assert [
        cluster.complete(prompt, NEW_TOKENS, ignore_eos=True, cache_salt=cluster.url) for prompt in PROMPTS
    ] == wanted
    cluster.until_idle()
    eventually(
        lambda: decode.metric("prefills_total", source="remote") == fetched + len(PROMPTS), "every prompt was fetched"
    )
    assert maps_of(decode) == maps


def maps_of(decode: Node) -> int:
    return decode.process.output.count("are copied out of its memory")


def pair(sources: int, targets: int, *prefill_flags: str) -> Pair:
    return (sources, prefill_flags), (targets, ())


@pytest.fixture(scope="module")
def made(model: Path) -> Iterator[dict[Pair, Cluster]]:
    with clusters(model, [pair(*ranks) for ranks in MAPPED]) as made:
        yield made


@pytest.mark.parametrize(("sources", "targets"), MAPPED)
def test_ranks_of_both_nodes_give_the_reference_tokens(
    made: dict[Pair, Cluster], wanted: list[list[int]], sources: int, targets: int
) -> None:
    # Each rank is linked with the ranks of the other node that have KV heads in common with it.
    linked = [len(set(head_map(KV_HEADS, *ranks))) for ranks in MAPPED if ranks[1] == targets]
    check(made[pair(sources, targets)], wanted, sum(linked))


@pytest.mark.nightly
@pytest.mark.parametrize(("sources", "targets"), MORE_RANKS)
def test_more_ranks_than_kv_heads_give_the_reference_tokens(
    model: Path, wanted: list[list[int]], sources: int, targets: int
) -> None:
    with clusters(model, [pair(sources, targets)]) as made:
        check(made[pair(sources, targets)], wanted, len(set(head_map(KV_HEADS, sources, targets))))


@pytest.mark.nightly
def test_ranks_whose_memory_is_not_mapped_give_the_reference_tokens(model: Path, wanted: list[list[int]]) -> None:
    """Over UCX, and through host memory. In every run, ``test_fp8_cache.py`` has such ranks."""
    pairs = [pair(1, 2, *NOT_MAPPED), ((2, STAGED), (2, STAGED))]
    with clusters(model, pairs) as made:
        for cluster in made.values():
            check(cluster, wanted, 0)
