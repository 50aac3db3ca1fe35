"""Tests that a prefill node that has nothing to prefill answers requests, and gives the tokens of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, cluster, sample
from tests.cluster.test_same_tokens import answers, prompt
from tests.eventually import eventually

LENGTHS = [17, 129, 300]
AT_ONCE = 6


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> dict[int, list[int]]:
    return answers(tiny_model, LENGTHS)


def rounds(running: Cluster, wanted: dict[int, list[int]]) -> Iterator[None]:
    """Asks for answers again and again, each round with prompts that no prefix cache has, and checks their tokens."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number in itertools.count():
            lengths = [*LENGTHS, *LENGTHS]
            asked = [
                pool.submit(running.complete, prompt(length), len(wanted[length]), cache_salt=f"{number}, {place}")
                for place, length in enumerate(lengths)
            ]
            assert [one.result() for one in asked] == [wanted[length] for length in lengths]
            yield


def requests_of(running: Cluster, node: str) -> float:
    return sample(running.url, "proxy_node_requests_total", node=node)


def test_an_idle_prefill_node_answers_and_prefills(tiny_model: Path, wanted: dict[int, list[int]]) -> None:
    flags = ("--dtype", "fp32", "--kv-cache-mib", "16")
    with cluster(tiny_model, *flags, proxy_flags=("--prefill-answers", "on")) as running:
        asking = rounds(running, wanted)

        def both() -> bool:
            next(asking)
            return (
                requests_of(running, "prefill-0") > 0
                and running.decode[0].metric("prefills_total", source="remote") > 0
            )

        eventually(both, "the prefill node has answered, and has computed prompts for the decode node", 120.0)
        running.until_idle()


def test_nodes_that_divide_the_cores_of_a_machine_keep_to_their_roles(
    tiny_model: Path, wanted: dict[int, list[int]]
) -> None:
    with cluster(tiny_model, "--dtype", "fp32", "--kv-cache-mib", "16") as running:
        for _ in itertools.islice(rounds(running, wanted), 3):
            pass
        assert requests_of(running, "decode-0") == 3 * 2 * len(LENGTHS)
        assert requests_of(running, "prefill-0") == 0
