"""Nodes change their roles and drain while they serve: by command line, in real clusters.

A role only says what the proxy routes to a node: each pair of nodes fetches prompts from each other. Of two mixed
nodes, each has its prompts computed by the other one.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.wire.terms import TICKET_HEADER, PrefillTarget
from tests.attacks.insider import Office, header
from tests.cluster import test_same_tokens as same
from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http
from tests.eventually import eventually
from tests.forks import program_of
from tests.processes import SECRET

TOKENS = 24
LENGTHS = [17, 129, 300]


@pytest.fixture(scope="module")
def three(tiny_model: Path) -> Iterator[Cluster]:
    """Yields a prefill and two decode nodes, which change their roles."""
    with cluster(tiny_model, "--dtype", "fp32", "--kv-cache-mib", "64", decode=2, forked=True) as running:
        yield running


def command(at: Cluster, *argv: str) -> int:
    subcommand, *rest = argv
    return main([subcommand, *rest, "--proxy-url", at.url], {**os.environ, "PDSERVE_SECRET": SECRET})


def roles(at: Cluster) -> dict[str, str]:
    return {instance["name"]: instance["role"] for instance in http(at.url + "/instances").json()}


def prompt(number: int) -> list[int]:
    return [(number * 131 + index * 17) % 500 + 3 for index in range(70)]


class Clients:
    """Clients that ask without a pause, and check each answer."""

    def __init__(self, at: Cluster) -> None:
        self._at = at
        self.stop = threading.Event()
        self.answered = 0
        self._lock = threading.Lock()

    def ask(self, client: int, expected: dict[int, list[int]]) -> None:
        turn = 0
        while not self.stop.is_set():
            number = (client + turn) % len(expected)
            assert self._at.complete(prompt(number), TOKENS, ignore_eos=True) == expected[number]
            turn += 1
            with self._lock:
                self.answered += 1


@contextmanager
def under_load(at: Cluster) -> Iterator[Clients]:
    """Has four clients ask during the block. Fails if one of their requests does, or its answer is another one."""
    expected = {number: at.complete(prompt(number), TOKENS, ignore_eos=True) for number in range(6)}
    clients = Clients(at)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(clients.ask, client, expected) for client in range(4)]
        try:
            yield clients
        finally:
            clients.stop.set()
        for client in asking:
            client.result()


def test_roles_change_in_both_directions_under_load(three: Cluster) -> None:
    with under_load(three) as clients:
        for node, role in [
            ("decode-1", "prefill"),
            ("prefill-0", "decode"),
            ("decode-0", "mixed"),
            ("prefill-0", "prefill"),
            ("decode-1", "decode"),
            ("decode-0", "decode"),
        ]:
            assert command(three, "role", node, role) == 0
            assert roles(three)[node] == role, "the proxy knows it when the command is over"
            before = clients.answered
            eventually(lambda before=before: clients.answered >= before + 8, "requests are answered")  # type: ignore[misc]
    assert roles(three) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    three.until_idle()


def test_a_node_of_a_new_role_does_what_the_role_says(three: Cluster) -> None:
    prefill, first, second = three.prefill[0], *three.decode
    for node, role in [("prefill-0", "decode"), ("decode-0", "prefill"), ("decode-1", "prefill")]:
        assert command(three, "role", node, role) == 0
    fetched = prefill.metric("prefills_total", source="remote")
    for number in range(40, 44):
        three.complete(prompt(number), 2)
    eventually(lambda: prefill.metric("prefills_total", source="remote") == fetched + 4, "it fetched four prompts")
    eventually(lambda: prefill.metric("itl_target_seconds") > 0, "its engine bounds its steps as a decode node's")
    assert first.metric("kv_transfers_total", direction="sent") > 0
    assert second.metric("kv_transfers_total", direction="sent") > 0
    for node, role in [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]:
        assert command(three, "role", node, role) == 0
    three.until_idle()


def test_a_proxy_learns_the_present_role_when_a_node_comes_back(three: Cluster) -> None:
    assert command(three, "role", "decode-1", "prefill") == 0
    node = next(each for each in three.decode if each.name == "decode-1")
    program = program_of(node.process.pid)
    os.kill(program, 19)
    try:
        eventually(lambda: "decode-1" not in roles(three), "the stopped node is dropped")
    finally:
        os.kill(program, 18)
    eventually(lambda: roles(three).get("decode-1") == "prefill", "it is back with the role that it had")
    assert command(three, "role", "decode-1", "decode") == 0


def test_nobody_commands_a_node_without_the_secret(three: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["role", "decode-1", "prefill", "--proxy-url", three.url]
    assert main(argv, {**os.environ, "PDSERVE_SECRET": "the secret of another cluster"}) == 1
    assert "decode-1 refuses: the command is not acceptable: wrong signature" in capsys.readouterr().err
    assert http(three.decode[1].url + "/internal/command", raw=b"").status == 401
    assert roles(three)["decode-1"] == "decode"


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
            "prompt": same.prompt(length),
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
    return same.answers(tiny_model, LENGTHS)


def test_every_node_fetches_from_every_other_one(three: Cluster, wanted: dict[int, list[int]]) -> None:
    # The prefill node is only fetched from.
    assert command(three, "role", "decode-1", "mixed") == 0
    pairings = [Pairing(three, *two) for two in permutations(three.decode, 2)]
    pairings += [Pairing(three, node, three.prefill[0]) for node in three.decode]
    before = {node.name: node.metric("prefills_total", source="remote") for node in three.decode}
    # All of them at once: each node answers, computes and pushes.
    with ThreadPoolExecutor(len(pairings) * len(LENGTHS)) as pool:
        asked = [
            (pairing, length, pool.submit(pairing.ask, length, len(wanted[length])))
            for length in LENGTHS
            for pairing in pairings
        ]
        for pairing, length, answer in asked:
            assert answer.result() == wanted[length], f"{pairing}, {length} tokens"
    three.until_idle()
    for node in three.decode:
        partners = sum(pairing.answering is node for pairing in pairings)
        eventually(
            lambda node=node, partners=partners: (  # type: ignore[misc]
                node.metric("prefills_total", source="remote") == before[node.name] + partners * len(LENGTHS)
            ),
            f"{node.name} fetched every prompt",
        )
        assert node.metric("kv_transfers_total", direction="sent") > 0
    assert command(three, "role", "decode-1", "decode") == 0


def test_drain_empties_a_node_and_ends_it(three: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    node = next(each for each in three.decode if each.name == "decode-1")
    with under_load(three):
        assert command(three, "drain", "decode-1") == 0
    assert "decode-1 has ended" in capsys.readouterr().out
    assert node.process.wait() == 0
    three.decode.remove(node)
    three.until_idle()


def test_two_mixed_nodes_compute_each_others_prompts(three: Cluster, wanted: dict[int, list[int]]) -> None:
    """It is the last test of the module: one node has ended before."""
    mixed = three.nodes
    for node in mixed:
        assert command(three, "role", node.name, "mixed") == 0
    counted = (
        ("prefills_total", {"source": "remote"}),
        ("kv_transfers_total", {"direction": "sent"}),
        ("prefills_total", {"source": "local"}),
    )
    before = [[node.metric(name, **labels) for name, labels in counted] for node in mixed]
    with ThreadPoolExecutor(12) as pool:
        asked = [
            (length, pool.submit(three.complete, same.prompt(length), len(wanted[length]), cache_salt=f"salt {turn}"))
            for turn in range(4)
            for length in LENGTHS
        ]
        for length, answer in asked:
            assert answer.result() == wanted[length], f"{length} tokens"
    three.until_idle()
    for node, so_far in zip(mixed, before, strict=True):
        fetched, sent, local = (
            node.metric(name, **labels) - count for (name, labels), count in zip(counted, so_far, strict=True)
        )
        assert fetched > 0 < sent
        assert local == 0
