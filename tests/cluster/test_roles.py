"""Tests that a role only says what the proxy routes to a node: each pair of nodes fetches prompts from each other.

Of two mixed nodes, each has its prompts computed by the other one.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.wire.terms import TICKET_HEADER, PrefillTarget
from tests.attacks.insider import Office, header
from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http
from tests.cluster.test_same_tokens import answers, prompt
from tests.eventually import eventually
from tests.processes import SECRET

LENGTHS = [17, 129, 300]


class Pairing:
    """A node that answers requests, and one that it is told to have their prompts computed by."""

    def __init__(self, running: Cluster, answering: Node, computing: Node) -> None:
        known = {instance["name"]: instance for instance in http(running.url + "/instances").json()}
        self.answering = answering
        self._office = Office(bytes.fromhex(known[answering.name]["boot_id"]))
        other = known[computing.name]
        self._target = PrefillTarget(computing.name, other["control"], bytes.fromhex(other["boot_id"]))

    def __str__(self) -> str:
        return f"{self.answering.name} from {self._target.name}"

    def ask(self, length: int, max_tokens: int) -> list[int]:
        """Returns the tokens of an answer to a prompt that no prefix cache has."""
        body = {
            "model": MODEL,
            "prompt": prompt(length),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "cache_salt": str(self),
        }
        request = urllib.request.Request(
            self.answering.url + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", TICKET_HEADER: header(self._office.frame(self._target))},
        )
        with urllib.request.urlopen(request, timeout=120.0) as response:
            ids: list[int] = json.loads(response.read())["choices"][0]["token_ids"]
        return ids


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> dict[int, list[int]]:
    return answers(tiny_model, LENGTHS)


@pytest.fixture(scope="module")
def four(tiny_model: Path) -> Iterator[Cluster]:
    with cluster(tiny_model, "--dtype", "fp32", "--kv-cache-mib", "16", decode=1, mixed=2) as running:
        yield running


def test_every_node_fetches_from_every_other_one(four: Cluster, wanted: dict[int, list[int]]) -> None:
    # The prefill node is only fetched from.
    pairings = [Pairing(four, *two) for two in permutations(four.decode, 2)]
    pairings += [Pairing(four, node, four.prefill[0]) for node in four.decode]
    before = {node.name: node.metric("prefills_total", source="remote") for node in four.decode}
    # All of them at once: each node answers, computes and pushes.
    with ThreadPoolExecutor(len(pairings) * len(LENGTHS)) as pool:
        asked = [
            (pairing, length, pool.submit(pairing.ask, length, len(wanted[length])))
            for length in LENGTHS
            for pairing in pairings
        ]
        for pairing, length, answer in asked:
            assert answer.result() == wanted[length], f"{pairing}, {length} tokens"
    four.until_idle()
    for node in four.decode:
        partners = sum(pairing.answering is node for pairing in pairings)
        eventually(
            lambda node=node, partners=partners: (  # type: ignore[misc]
                node.metric("prefills_total", source="remote") == before[node.name] + partners * len(LENGTHS)
            ),
            f"{node.name} fetched every prompt",
        )
        assert node.metric("kv_transfers_total", direction="sent") > 0


def test_two_mixed_nodes_compute_each_others_prompts(four: Cluster, wanted: dict[int, list[int]]) -> None:
    """It is the last test of the module: it ends the other nodes."""
    for leaving in ("prefill-0", "decode-0"):
        assert main(["drain", leaving, "--proxy-url", four.url], {**os.environ, "PDSERVE_SECRET": SECRET}) == 0
    mixed = [node for node in four.decode if node.name.startswith("mixed")]
    counted = (("prefills_total", {"source": "remote"}), ("kv_transfers_total", {"direction": "sent"}))
    before = [[node.metric(name, **labels) for name, labels in counted] for node in mixed]
    with ThreadPoolExecutor(12) as pool:
        asked = [
            (length, pool.submit(four.complete, prompt(length), len(wanted[length]), cache_salt=f"salt {turn}"))
            for turn in range(4)
            for length in LENGTHS
        ]
        for length, answer in asked:
            assert answer.result() == wanted[length], f"{length} tokens"
    eventually(lambda: all(node.idle for node in mixed), "both nodes idle")
    for node, of_node in zip(mixed, before, strict=True):
        for (name, labels), so_far in zip(counted, of_node, strict=True):
            assert node.metric(name, **labels) > so_far, name
        assert node.metric("prefills_total", source="local") == 0
