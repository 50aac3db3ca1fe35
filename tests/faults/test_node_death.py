"""Processes that die, hang and restart under a running request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http, one_core, start_node
from tests.eventually import eventually

PROMPT = [11 + i % 400 for i in range(1400)]
NEW_TOKENS = 6
# Without a prefix cache: every prompt has to be prefilled anew.
FLAGS = ("--dtype", "fp32", "--max-step-tokens", "64", "--max-running", "16", "--prefix-cache", "off")


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[int]:
    """What a healthy mixed node answers."""
    with cluster(demo_model, "--dtype", "fp32", prefill=0, decode=0, mixed=1) as healthy:
        return healthy.complete(PROMPT, NEW_TOKENS, ignore_eos=True)


@pytest.fixture
def victims(demo_model: Path) -> Iterator[Cluster]:
    """One prefill and one decode node that a test may break."""
    with cluster(demo_model, *FLAGS) as running:
        yield running


@contextmanager
def prefilling(broken: Cluster) -> Iterator[Future[list[int]]]:
    """A request whose prompt is being computed on the prefill node."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(broken.complete, PROMPT, NEW_TOKENS, ignore_eos=True)
        steps = broken.prefill[0].metric("engine_steps_total")
        eventually(lambda: broken.prefill[0].metric("engine_steps_total") > steps, "some chunks are computed")
        assert not answer.done()
        yield answer


def engine_pid(node: Node) -> int:
    """The engine is the only child of a node's API process."""
    pid = node.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def until_used_again(cluster: Cluster, expected: list[int]) -> None:
    """The prefill node is asked again. Until it has answered a greeting, requests are prefilled where they decode."""

    def used() -> bool:
        assert cluster.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
        return cluster.decode[0].metric("prefills_total", source="remote") > 0

    eventually(used, "the prefill node computes prompts again")


def fallbacks(cluster: Cluster) -> float:
    return cluster.decode[0].metric("fallbacks_total")


def test_prefill_node_killed_while_prefilling(victims: Cluster, expected: list[int], demo_model: Path) -> None:
    with prefilling(victims) as answer:
        # Its engine goes with it: the kernel sees to that.
        os.kill(victims.prefill[0].process.pid, signal.SIGKILL)
        assert answer.result(120) == expected
    decode = victims.decode[0]
    eventually(lambda: decode.idle, "all blocks of the decode node are free")
    assert fallbacks(victims) == 1
    # Without any prefill node, answers are slower but right.
    eventually(lambda: len(http(victims.url + "/instances").json()) == 1, "the dead node is dropped")
    assert victims.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
    # A new one is used at once.
    with start_node("prefill", "prefill-new", demo_model, victims, *FLAGS, *one_core(0)) as process:
        process.listening()
        eventually(lambda: len(http(victims.url + "/instances").json()) == 2, "the new node is registered")
        assert victims.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
    eventually(lambda: decode.metric("prefills_total", source="remote") == 1, "its metrics say so")


def test_prefill_engine_alone_killed(victims: Cluster, expected: list[int]) -> None:
    with prefilling(victims) as answer:
        os.kill(engine_pid(victims.prefill[0]), signal.SIGKILL)
        assert answer.result(120) == expected
    assert victims.prefill[0].process.wait() == 1
    eventually(lambda: victims.decode[0].idle, "all blocks of the decode node are free")


def test_prefill_engine_that_hangs(victims: Cluster, expected: list[int]) -> None:
    pid = engine_pid(victims.prefill[0])
    with prefilling(victims) as answer:
        os.kill(pid, signal.SIGSTOP)
        try:
            assert answer.result(120) == expected
        finally:
            os.kill(pid, signal.SIGCONT)
    assert victims.decode[0].metric("leases_expired_total") == 1
    victims.until_idle()
    until_used_again(victims, expected)


def test_decode_engine_that_hangs(victims: Cluster, expected: list[int]) -> None:
    """The prefill node gives it up and has its blocks back; the decode node finds out when it goes on."""
    prefill, pid = victims.prefill[0], engine_pid(victims.decode[0])
    with prefilling(victims) as answer:
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: prefill.metric("leases_expired_total") == 1, "its lease runs out")
            eventually(lambda: prefill.idle, "all blocks of the prefill node are free")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.result(120) == expected
    victims.until_idle()
    until_used_again(victims, expected)


def test_another_prefill_node_takes_over(demo_model: Path, expected: list[int]) -> None:
    with cluster(demo_model, *FLAGS, prefill=2) as broken, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(broken.complete, PROMPT, NEW_TOKENS, ignore_eos=True)

        def busy() -> Node | None:
            return next((node for node in broken.prefill if node.metric("num_requests_running")), None)

        eventually(lambda: busy() is not None, "one of them prefills")
        victim = busy()
        assert victim is not None
        os.kill(victim.process.pid, signal.SIGKILL)
        assert answer.result(120) == expected
        (other,) = [node for node in broken.prefill if node is not victim]
        eventually(lambda: broken.decode[0].idle and other.idle, "all blocks are free")
        assert other.metric("kv_transfers_total", direction="sent") == 1


def test_prefill_that_misses_its_deadline(demo_model: Path, expected: list[int]) -> None:
    with cluster(demo_model, *FLAGS, "--prefill-timeout-ms", "400") as slow:
        assert slow.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
        slow.until_idle()
        assert fallbacks(slow) == 1
        assert slow.decode[0].metric("kv_transfer_failures_total", reason="deadline") == 1


def test_decode_node_killed_mid_stream(victims: Cluster) -> None:
    body = {"model": MODEL, "prompt": PROMPT[:100], "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(http, victims.url + "/v1/completions", body)
        eventually(lambda: victims.decode[0].metric("generation_tokens_total") > 5, "tokens are streamed")
        os.kill(victims.decode[0].process.pid, signal.SIGKILL)
        text = stream.result(60).body
    assert b'"error"' in text
    assert b"[DONE]" not in text
    eventually(lambda: victims.prefill[0].idle, "all blocks of the prefill node are free")


def test_decode_node_killed_during_prefill(victims: Cluster) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            http, victims.url + "/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": NEW_TOKENS}
        )
        eventually(lambda: victims.prefill[0].metric("num_requests_running") > 0, "the prompt is computed")
        os.kill(victims.decode[0].process.pid, signal.SIGKILL)
        assert reply.result(60).status in (502, 503)
    eventually(lambda: victims.prefill[0].idle, "all blocks of the prefill node are free")


def test_restarted_decode_node_is_served_by_the_same_prefill_node(
    victims: Cluster, expected: list[int], demo_model: Path
) -> None:
    assert victims.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
    os.kill(victims.decode[0].process.pid, signal.SIGKILL)
    with ExitStack() as stack:
        process = stack.enter_context(start_node("decode", "decode-0", demo_model, victims, *FLAGS, *one_core(1)))
        again = Node("decode-0", process, process.listening().url)

        def names_the_new_one() -> bool:
            instances = http(victims.url + "/instances").json()
            return [i["url"] for i in instances if i["role"] == "decode"] == [again.url]

        eventually(names_the_new_one, "the proxy knows the new process only")
        assert victims.complete(PROMPT, NEW_TOKENS, ignore_eos=True) == expected
        eventually(lambda: again.metric("prefills_total", source="remote") == 1, "its metrics say so")
