"""Tests that a P/D cluster, a mixed node and transformers give the same greedy tokens in fp32."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.nodes import ServedCluster, random_prompt, served
from tests.tiny_models import Reference

NEW_TOKENS = 8
BLOCK = 16
# These are lengths around one block, several blocks, the token budget of one step (256) and several budgets, up to
# 1,500 tokens.
LENGTHS = [
    *(1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1),
    *(BLOCK - NEW_TOKENS, BLOCK - NEW_TOKENS + 1, 3 * BLOCK + 5, 63, 64, 65, 100, 127, 128, 129),
    *(255, 256, 257, 271, 272, 273, 300, 511, 512, 513, 767, 1024, 1025, 1499, 1500),
]


def prompt(length: int) -> list[int]:
    return random_prompt(length, seed=length)


FEW = [1, BLOCK, BLOCK + 1, 129, 300]


@dataclass(frozen=True)
class Served:
    """A cluster that serves a model, with the answers of transformers."""

    cluster: ServedCluster
    wanted: dict[int, list[int]]
    """The answers of transformers, by prompt length."""


@pytest.fixture(
    scope="module", params=["tiny", "demo", pytest.param("demo at every length", marks=pytest.mark.nightly)]
)
def pair(request: pytest.FixtureRequest, tiny_model: Path, demo_model: Path) -> Iterator[Served]:
    """Yields a tiny model, whose tokens show an error as well, with every length, and a real one with some or all."""
    if request.param == "tiny":
        yield Served(request.getfixturevalue("pd_cluster"), answers(tiny_model, LENGTHS))
        return
    with served(demo_model, dtype="fp32") as running:
        yield Served(running, answers(demo_model, FEW if request.param == "demo" else LENGTHS))


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo at every length", marks=pytest.mark.nightly)])
def mixed(request: pytest.FixtureRequest, tiny_model: Path, demo_model: Path) -> Iterator[Served]:
    if request.param == "tiny":
        yield Served(request.getfixturevalue("mixed_cluster"), answers(tiny_model, LENGTHS))
        return
    with served(demo_model, prefill=0, decode=0, mixed=1, dtype="fp32") as running:
        yield Served(running, answers(demo_model, LENGTHS))


def answers(model: Path, lengths: list[int]) -> dict[int, list[int]]:
    reference = Reference(model, NEW_TOKENS)
    return {length: reference.answer(prompt(length)) for length in lengths}


def ask(cluster: ServedCluster, length: int, salt: str) -> list[int]:
    """Returns the answer to a prompt that shares cached blocks only with prompts of the same ``salt``."""
    return cluster.complete(prompt(length), NEW_TOKENS, ignore_eos=True, cache_salt=salt)


def alone(cluster: ServedCluster, lengths: Iterable[int], salt: str) -> dict[int, list[int]]:
    return {length: ask(cluster, length, salt) for length in lengths}


def eight_at_a_time(cluster: ServedCluster, lengths: Iterable[int], salt: str) -> dict[int, list[int]]:
    shuffled = random.Random(0).sample(in_order := list(lengths), len(in_order))
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda length: ask(cluster, length, salt), shuffled)
        return dict(zip(shuffled, answers, strict=True))


def prefills(cluster: ServedCluster, source: str) -> float:
    return sum(node.metric("prefills_total", source=source) for node in cluster.decode)


def salt_of(request: pytest.FixtureRequest) -> str:
    """Returns a salt that no other test uses."""
    return str(request.node.name)


@pytest.mark.timeout(600)
def test_prefill_and_decode_nodes_alone(pair: Served, request: pytest.FixtureRequest) -> None:
    assert alone(pair.cluster, pair.wanted, salt_of(request)) == pair.wanted


@pytest.mark.timeout(600)
def test_prefill_and_decode_nodes_eight_at_a_time(pair: Served, request: pytest.FixtureRequest) -> None:
    pair.cluster.until_idle()  # Only then do the nodes' counts include all earlier requests.
    before = prefills(pair.cluster, "remote")
    assert eight_at_a_time(pair.cluster, pair.wanted, salt_of(request)) == pair.wanted
    pair.cluster.until_idle()
    # Every prompt of more than one block was prefilled remotely.
    assert prefills(pair.cluster, "remote") - before == sum(length > BLOCK for length in pair.wanted)


@pytest.mark.timeout(600)
def test_mixed_node_alone(mixed: Served, request: pytest.FixtureRequest) -> None:
    assert alone(mixed.cluster, mixed.wanted, salt_of(request)) == mixed.wanted


@pytest.mark.timeout(600)
def test_mixed_node_eight_at_a_time(mixed: Served, request: pytest.FixtureRequest) -> None:
    assert eight_at_a_time(mixed.cluster, mixed.wanted, salt_of(request)) == mixed.wanted


def test_a_seeded_answer_is_the_same_on_both(pd_cluster: ServedCluster, mixed_cluster: ServedCluster) -> None:
    for seed in (1, 2):
        options = {"temperature": 0.8, "top_p": 0.9, "seed": seed, "ignore_eos": True}
        answers = [cluster.complete(prompt(40), 24, **options) for cluster in (pd_cluster, mixed_cluster, pd_cluster)]
        assert answers[0] == answers[1] == answers[2]
