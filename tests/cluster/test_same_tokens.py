"""Greedy tokens of the P/D cluster = of a mixed node = of transformers, in fp32."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster
from tests.tiny_models import Reference

NEW_TOKENS = 8
BLOCK = 16
# Around one block, several blocks, one step's token budget (256) and several of them, up to 1,500 tokens.
LENGTHS = [
    *(1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1),
    *(BLOCK - NEW_TOKENS, BLOCK - NEW_TOKENS + 1, 3 * BLOCK + 5, 63, 64, 65, 100, 127, 128, 129),
    *(255, 256, 257, 271, 272, 273, 300, 511, 512, 513, 767, 1024, 1025, 1499, 1500),
]


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 49_000), k=length)


@pytest.fixture(scope="session")
def wanted(demo_model: Path) -> dict[int, list[int]]:
    """What transformers generates, by prompt length."""
    reference = Reference(demo_model, NEW_TOKENS)
    return {length: reference.answer(prompt(length)) for length in LENGTHS}


def ask(cluster: Cluster, length: int, salt: str) -> list[int]:
    """Prompts find what others of the same ``salt`` left in the prefix caches."""
    return cluster.complete(prompt(length), NEW_TOKENS, ignore_eos=True, cache_salt=salt)


def alone(cluster: Cluster, salt: str) -> dict[int, list[int]]:
    return {length: ask(cluster, length, salt) for length in LENGTHS}


def eight_at_a_time(cluster: Cluster, salt: str) -> dict[int, list[int]]:
    shuffled = random.Random(0).sample(LENGTHS, len(LENGTHS))
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda length: ask(cluster, length, salt), shuffled)
        return dict(zip(shuffled, answers, strict=True))


def prefills(cluster: Cluster, source: str) -> float:
    return sum(node.metric("prefills_total", source=source) for node in cluster.decode)


@pytest.mark.timeout(600)
def test_prefill_and_decode_nodes_alone(pd_cluster: Cluster, wanted: dict[int, list[int]]) -> None:
    assert alone(pd_cluster, "alone") == wanted


@pytest.mark.timeout(600)
def test_prefill_and_decode_nodes_eight_at_a_time(pd_cluster: Cluster, wanted: dict[int, list[int]]) -> None:
    pd_cluster.until_idle()  # what nodes count of earlier requests is in their figures then
    before = prefills(pd_cluster, "remote")
    assert eight_at_a_time(pd_cluster, "eight") == wanted
    pd_cluster.until_idle()
    # Every prompt of more than one block was prefilled remotely.
    assert prefills(pd_cluster, "remote") - before == sum(length > BLOCK for length in LENGTHS)


@pytest.mark.timeout(600)
def test_mixed_node_alone(mixed_cluster: Cluster, wanted: dict[int, list[int]]) -> None:
    assert alone(mixed_cluster, "alone") == wanted


@pytest.mark.timeout(600)
def test_mixed_node_eight_at_a_time(mixed_cluster: Cluster, wanted: dict[int, list[int]]) -> None:
    assert eight_at_a_time(mixed_cluster, "eight") == wanted


def test_a_seeded_answer_is_the_same_on_both(pd_cluster: Cluster, mixed_cluster: Cluster) -> None:
    for seed in (1, 2):
        options = {"temperature": 0.8, "top_p": 0.9, "seed": seed, "ignore_eos": True}
        answers = [cluster.complete(prompt(40), 24, **options) for cluster in (pd_cluster, mixed_cluster, pd_cluster)]
        assert answers[0] == answers[1] == answers[2]
