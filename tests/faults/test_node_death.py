"""Tests processes that die, hang or restart while a request runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.nodes import EARLY_LOSS, MODEL, Cluster, Node, cluster, http, one_core, start_node
from tests.eventually import eventually
from tests.forks import program_of
from tests.processes import alive
from tests.tiny_models import Reference

PROMPT = [11 + i % 400 for i in range(800)]
NEW_TOKENS = 6
# Without a prefix cache, every prompt has to be prefilled again. It takes many steps, so that a test can act between
# them. An engine that a test stops stays: its node does not take it for hanging, however long the test takes.
FLAGS = (
    *("--dtype", "fp32", "--max-num-batched-tokens", "16", "--max-num-seqs", "8", "--prefix-cache", "off"),
    *("--engine-silence-ms", "600000"),
    # A transfer from or to a node that a test stops is given up sooner.
    *("--transfer-lease-ms", "1500", "--transfer-heartbeat-ms", "200"),
)


@pytest.fixture(scope="module")
def reference(slow_tiny_model: Path) -> Reference:
    return Reference(slow_tiny_model, NEW_TOKENS)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[int]:
    """Returns the answer of transformers."""
    return reference.answer(PROMPT)


@dataclass(frozen=True)
class Broken:
    """A prefill and a decode node that tests break and replace."""

    cluster: Cluster
    model: Path
    stack: ExitStack

    def start(self, role: str) -> Node:
        """Starts a further node, waits until it listens, and adds it to ``cluster``."""
        core = one_core(0 if role == "prefill" else 1)
        process = self.stack.enter_context(start_node(role, role, self.model, self.cluster, *FLAGS, *core))
        node = Node(role, process, process.listening().url)
        (self.cluster.prefill if role == "prefill" else self.cluster.decode).append(node)
        return node

    def mend(self) -> None:
        """Replaces nodes that have ended. Returns when the proxy knows the living nodes and they are idle."""
        for role, nodes in (("prefill", self.cluster.prefill), ("decode", self.cluster.decode)):
            nodes[:] = [node for node in nodes if node.process.popen.poll() is None]
            if not nodes:
                self.start(role)
        self.until_known()
        self.cluster.until_idle()

    def until_known(self) -> None:
        """Waits until the proxy knows the living nodes and no others."""
        living = {node.url for node in self.cluster.nodes}
        eventually(lambda: {known["url"] for known in http(self.cluster.url + "/instances").json()} == living)


@pytest.fixture(scope="module")
def broken(slow_tiny_model: Path) -> Iterator[Broken]:
    # Without another decode node, a request ends after two seconds.
    flags = (*EARLY_LOSS, "--resume-wait-s", "2")
    with cluster(slow_tiny_model, *FLAGS, proxy_flags=flags) as running, ExitStack() as stack:
        yield Broken(running, slow_tiny_model, stack)


@pytest.fixture
def victims(broken: Broken) -> Cluster:
    """Returns one prefill and one decode node, both unharmed, which a test may break."""
    broken.mend()
    return broken.cluster


@contextmanager
def prefilling(broken: Cluster) -> Iterator[Future[list[int]]]:
    """Yields the answer to a request whose prompt the prefill node is computing."""
    with ThreadPoolExecutor(1) as pool:
        steps = broken.prefill[0].metric("engine_steps_total")
        answer = pool.submit(broken.complete, PROMPT, NEW_TOKENS, ignore_eos=True)
        eventually(lambda: broken.prefill[0].metric("engine_steps_total") > steps, "some chunks are computed")
        assert not answer.done()
        yield answer


def engine_pid(node: Node) -> int:
    """Returns the process id of the engine, which is the only child of a node's API process."""
    pid = program_of(node.process.pid)
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return program_of(int(child))


def kill(node: Node) -> None:
    """Kills the node's API process. The kernel then ends its engine."""
    engine = engine_pid(node)
    os.kill(node.process.pid, signal.SIGKILL)
    eventually(lambda: not alive(engine), "the engine is gone")


def remote(cluster: Cluster) -> float:
    return cluster.decode[0].metric("prefills_total", source="remote")


def until_used_again(cluster: Cluster, expected: list[int]) -> None:
    """Waits until the prefill node is used again. Before it answers a greeting, the decode node prefills itself."""
    before = remote(cluster)

    def used() -> bool:
        assert cluster.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
        return remote(cluster) > before

    eventually(used, "the prefill node computes prompts again")


def fallbacks(cluster: Cluster) -> float:
    return cluster.decode[0].metric("fallbacks_total")


def counted(node: Node) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Returns the series of all counters and histograms of the node."""
    return {
        (sample.name, frozenset(sample.labels.items()))
        for family in text_string_to_metric_families(http(node.url + "/metrics").body.decode())
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def test_prefill_node_killed_while_prefilling(broken: Broken, victims: Cluster, expected: list[int]) -> None:
    before, fetched = fallbacks(victims), remote(victims)
    with prefilling(victims) as answer:
        kill(victims.prefill.pop())
        assert answer.result(120) == expected
    decode = victims.decode[0]
    eventually(lambda: decode.idle, "all blocks of the decode node are free")
    eventually(lambda: fallbacks(victims) == before + 1, "its metrics say so")
    # Without a prefill node, answers are slower but correct.
    broken.until_known()
    assert victims.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
    # A new prefill node is used at once. It shows every series with which others count failures, some of them as soon
    # as its engine has said what it counts.
    new = broken.start("prefill")
    eventually(lambda: counted(new) == counted(decode), "it shows every series")
    broken.until_known()
    assert victims.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
    eventually(lambda: remote(victims) == fetched + 1, "its metrics say so")


@pytest.mark.nightly
def test_prefill_engine_alone_killed(victims: Cluster, expected: list[int]) -> None:
    with prefilling(victims) as answer:
        os.kill(engine_pid(victims.prefill[0]), signal.SIGKILL)
        assert answer.result(120) == expected
    assert victims.prefill[0].process.wait() == 1
    eventually(lambda: victims.decode[0].idle, "all blocks of the decode node are free")


def test_prefill_engine_that_hangs(victims: Cluster, expected: list[int]) -> None:
    pid = engine_pid(victims.prefill[0])
    expired = victims.decode[0].metric("leases_expired_total", direction="received")
    with prefilling(victims) as answer:
        os.kill(pid, signal.SIGSTOP)
        try:
            assert answer.result(120) == expected
        finally:
            os.kill(pid, signal.SIGCONT)
    eventually(
        lambda: victims.decode[0].metric("leases_expired_total", direction="received") == expired + 1,
        "its metrics say so",
    )
    victims.until_idle()
    until_used_again(victims, expected)


def test_decode_engine_that_hangs(victims: Cluster, expected: list[int]) -> None:
    """The prefill node ends the decode node's lease and frees its blocks. The decode node notices it afterwards."""
    prefill, pid = victims.prefill[0], engine_pid(victims.decode[0])
    expired = prefill.metric("leases_expired_total", direction="sent")
    with prefilling(victims) as answer:
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(
                lambda: prefill.metric("leases_expired_total", direction="sent") == expired + 1, "its lease runs out"
            )
            eventually(lambda: prefill.idle, "all blocks of the prefill node are free")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.result(120) == expected
    victims.until_idle()
    until_used_again(victims, expected)


def test_another_prefill_node_takes_over(broken: Broken, victims: Cluster, expected: list[int]) -> None:
    broken.start("prefill")
    broken.until_known()
    sent = {node.url: node.metric("kv_transfers_total", direction="sent") for node in victims.prefill}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(victims.complete, PROMPT, NEW_TOKENS, ignore_eos=True)

        def busy() -> Node | None:
            return next((node for node in victims.prefill if node.metric("num_requests_running")), None)

        victim = eventually(busy, "one of them prefills")
        kill(victim)
        assert answer.result(120) == expected
        (other,) = [node for node in victims.prefill if node is not victim]
        eventually(lambda: victims.decode[0].idle and other.idle, "all blocks are free")
        wanted = sent[other.url] + 1
        eventually(lambda: other.metric("kv_transfers_total", direction="sent") == wanted, "its metrics say so")


def test_decode_node_killed_during_prefill(broken: Broken, victims: Cluster, expected: list[int]) -> None:
    """The prefill node that computed for it serves the one that is started in its place."""
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            http, victims.url + "/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": NEW_TOKENS}
        )
        eventually(lambda: victims.prefill[0].metric("num_requests_running") > 0, "the prompt is computed")
        kill(victims.decode.pop())
        assert reply.result(60).status in (502, 503)
    eventually(lambda: victims.prefill[0].idle, "all blocks of the prefill node are free")
    again = broken.start("decode")
    broken.until_known()
    assert victims.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
    eventually(lambda: again.metric("prefills_total", source="remote") == 1, "its metrics say so")


def test_decode_node_killed_mid_stream(victims: Cluster) -> None:
    body = {"model": MODEL, "prompt": PROMPT[:100], "max_tokens": 1500, "stream": True, "ignore_eos": True}
    generated = victims.decode[0].metric("generation_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(http, victims.url + "/v1/completions", body)
        eventually(lambda: victims.decode[0].metric("generation_tokens_total") > generated + 5, "tokens are streamed")
        kill(victims.decode[0])
        text = stream.result(60).body
    assert b'"error"' in text
    assert b"[DONE]" not in text
    eventually(lambda: victims.prefill[0].idle, "all blocks of the prefill node are free")


def test_prefill_that_misses_its_deadline(slow_tiny_model: Path, reference: Reference) -> None:
    prompt = PROMPT[:120]
    # On any machine, steps of two tokens take far longer than the time that a prompt of this length may take.
    steps = ("--max-num-batched-tokens", "2", "--max-num-seqs", "1", "--dtype", "fp32", "--prefix-cache", "off")
    with cluster(slow_tiny_model, *steps, "--prefill-timeout-ms", "10", forked=True) as slow:
        assert slow.complete(prompt, NEW_TOKENS, ignore_eos=True) == reference.answer(prompt)
        slow.until_idle()
        assert fallbacks(slow) == 1
        assert slow.decode[0].metric("kv_transfer_failures_total", reason="deadline") == 1
