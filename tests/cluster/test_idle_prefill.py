"""Tests that a prefill node that has nothing to prefill answers requests, and gives the tokens of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, sample
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
                pool.submit(
                    running.complete,
                    prompt(length),
                    len(wanted[length]),
                    cache_salt=f"{running.url}, {number}, {place}",
                )
                for place, length in enumerate(lengths)
            ]
            assert [one.result() for one in asked] == [wanted[length] for length in lengths]
            yield


def requests_of(running: Cluster, node: str) -> float:
    """Returns how many requests the cluster's proxy has sent to a node."""
    return sample(running.url, "proxy_node_requests_total", node=node)


def test_an_idle_prefill_node_answers_and_prefills(tiny_pair: Cluster, wanted: dict[int, list[int]]) -> None:
    running = tiny_pair.behind(tiny_pair.others[0])
    (decode,) = running.decode
    asking, before = rounds(running, wanted), decode.metric("prefills_total", source="remote")

    def both() -> bool:
        next(asking)
        return requests_of(running, "prefill-0") > 0 and decode.metric("prefills_total", source="remote") > before

    eventually(both, "the prefill node has answered, and has computed prompts for the decode node", 120.0)
    running.until_idle()


def test_nodes_that_divide_the_cores_of_a_machine_keep_to_their_roles(
    tiny_pair: Cluster, wanted: dict[int, list[int]]
) -> None:
    before = requests_of(tiny_pair, "decode-0")
    for _ in itertools.islice(rounds(tiny_pair, wanted), 3):
        pass
    assert requests_of(tiny_pair, "decode-0") - before == 3 * 2 * len(LENGTHS)
    assert requests_of(tiny_pair, "prefill-0") == 0
