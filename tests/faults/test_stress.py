"""Tests hundreds of requests at once over real nodes. Some clients leave, and one node is killed.

In every run, clients leave in ``test_cancel.py``, and nodes are killed in ``test_node_death.py``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http, one_core, start_node
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid
from tests.tiny_models import VOCAB_SIZE, Reference, save_tiny_chat_model

REQUESTS = 560
ALIVE_AT_ONCE = 500
RESTART_AFTER = 60
PROMPTS = 40
NEW_TOKENS = 5
PATIENCE_S = 120.0
LENGTHS = (20, 90)
FLAGS = (
    *("--dtype", "fp32", "--kv-cache-mib", "64", "--prefix-cache", "off"),
    *("--max-num-batched-tokens", "1280", "--max-num-seqs", "640", "--transfer-lease-ms", "30000"),
    # A stopped engine stays, however long the crowd takes to come.
    *("--engine-silence-ms", "600000"),
)


def prompt(number: int) -> list[int]:
    dice = random.Random(number)
    return dice.choices(range(3, VOCAB_SIZE), k=dice.randint(*LENGTHS))


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny model with the demo model's tokenizer."""
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    """Returns the answers of transformers."""
    reference = Reference(model, NEW_TOKENS)
    return [reference.answer(prompt(number)) for number in range(PROMPTS)]


@pytest.fixture
def nodes(model: Path) -> Iterator[Cluster]:
    with cluster(model, *FLAGS, prefill=2) as running:
        yield running


@dataclass(frozen=True)
class Held:
    """The descriptors and threads of an engine process, which would grow if it forgot to free any."""

    files: int
    threads: int

    @classmethod
    def by(cls, node: Node) -> Held:
        process = Path("/proc", str(engine_pid(node)))
        return cls(len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> list[int]:
    body = {"model": MODEL, "prompt": prompt(number), "max_tokens": NEW_TOKENS, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    async with session.post(url + "/v1/completions", json=body | more) as response:
        assert response.status == 200, await response.text()
        ids: list[int] = (await response.json())["choices"][0]["token_ids"]
        return ids


class Crowd:
    """Clients that all ask at once, and some of which leave early. ``run`` needs a thread of its own."""

    def __init__(self, url: str, wanted: list[list[int]]) -> None:
        self.answered = 0
        self.left = 0
        self.some_answered = threading.Event()
        self._url = url
        self._wanted = wanted
        self._dice = random.Random(0)

    def run(self) -> None:
        """Returns when no client waits any more. Raises AssertionError if an answer is wrong or missing."""
        try:
            asyncio.run(self._ask())
        finally:
            self.some_answered.set()

    async def _ask(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            numbers = [self._dice.randrange(PROMPTS) for _ in range(REQUESTS)]
            tasks = {asyncio.create_task(ask(session, self._url, number)): number for number in numbers}
            waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.cancelled():
                        self.left += 1
                        continue
                    assert task.result() == self._wanted[tasks[task]]
                    self.answered += 1
                    if waiting and self._dice.random() < 0.3:
                        self._dice.choice(list(waiting)).cancel()
                if self.answered >= RESTART_AFTER:
                    self.some_answered.set()


def instance(node: Node, nodes: Cluster) -> dict[str, str]:
    """Returns a node as the proxy describes it."""
    (known,) = [i for i in http(nodes.url + "/instances").json() if i["url"] == node.url]
    return cast(dict[str, str], known)


def restart(victim: Node, known: dict[str, str], nodes: Cluster, model: Path, stack: ExitStack) -> Node:
    """Starts a prefill node at the addresses of a dead one. Returns when the proxy knows it."""
    ports = ("--port", str(urlsplit(victim.url).port), "--transfer-port", str(urlsplit(known["control"]).port))
    process = stack.enter_context(start_node("prefill", victim.name, model, nodes, *FLAGS, *ports, *one_core(1)))
    again = Node(victim.name, process, process.listening().url)

    def known_now() -> bool:
        boots = {i["boot_id"] for i in http(nodes.url + "/instances").json() if i["url"] == victim.url}
        return len(boots) == 1 and known["boot_id"] not in boots

    eventually(known_now, "the proxy knows the new process only")
    return again


def failures(decode: Node) -> float:
    """Returns how many transfers were lost with a dead node, noticed by its connection or by its silence."""
    return sum(decode.metric("kv_transfer_failures_total", reason=reason) for reason in ("peer_lost", "lease_expired"))


@contextmanager
def stopped(nodes: list[Node]) -> Iterator[None]:
    """Stops the engines of these nodes during the block."""
    engines = [engine_pid(node) for node in nodes]
    for engine in engines:
        os.kill(engine, signal.SIGSTOP)
    try:
        yield
    finally:
        for engine in engines:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)


@pytest.mark.nightly
def test_hundreds_of_requests_a_killed_node_and_clients_that_leave(
    nodes: Cluster, model: Path, wanted: list[list[int]]
) -> None:
    for number in range(2):
        assert nodes.complete(prompt(number), NEW_TOKENS, ignore_eos=True) == wanted[number]
    first, victim = nodes.prefill
    (decode,) = nodes.decode
    before = {node.name: Held.by(node) for node in (first, decode)}
    known = instance(victim, nodes)
    crowd = Crowd(nodes.url, wanted)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        with stopped(nodes.prefill):
            crowding = pool.submit(crowd.run)
            eventually(
                lambda: decode.metric("num_requests_waiting_for_remote_kvs") >= ALIVE_AT_ONCE, "transfers are alive"
            )
            os.kill(victim.process.pid, signal.SIGKILL)
            victim.process.wait()
        assert crowd.some_answered.wait(PATIENCE_S)
        again = restart(victim, known, nodes, model, stack)
        crowding.result(PATIENCE_S)
        assert crowd.left > 50
        eventually(lambda: failures(decode) > 100, "the dead node's transfers were alive")
        assert crowd.answered + crowd.left == REQUESTS
        nodes.prefill[:] = [first, again]
        nodes.until_idle()
        sent = again.metric("kv_transfers_total", direction="sent")
        for number in range(PROMPTS):
            assert nodes.complete(prompt(number), NEW_TOKENS, ignore_eos=True) == wanted[number]
        nodes.until_idle()
        assert again.metric("kv_transfers_total", direction="sent") > sent, "the new boot is used"
        for node in (first, decode):
            held = before[node.name]
            eventually(lambda: Held.by(node).files <= held.files, "no descriptor is left")  # noqa: B023
            assert Held.by(node).threads <= held.threads
