"""Tests proxy, prefill and decode node on hosts of their own, over a network that delays, loses or is cut.

An answer always comes, is always that of transformers, and leaves every block free on both nodes.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.cluster.nodes import MODEL, http
from tests.cluster.test_cluster import open_stream
from tests.eventually import eventually
from tests.hosts.cluster import BLOCK_BYTES, LEASE_S, PROMPT_TOKENS, Hosts, open_files, prompt, threads
from tests.hosts.wire import Path
from tests.tiny_models import Reference

PROMPT_BYTES = -(-PROMPT_TOKENS // 16) * BLOCK_BYTES
IN_THE_MIDDLE = PROMPT_BYTES // 3
TIMEOUT_S = 60


def to_decode(hosts: Hosts) -> Path:
    """Returns the path on which KV blocks move."""
    return hosts.network.wire.path("prefill", "decode")


def test_blocks_cross_the_network(hosts: Hosts, reference: Reference) -> None:
    remote, passed = hosts.prefills("remote"), to_decode(hosts).passed
    assert hosts.ask(1) == reference.answer(prompt(1))
    eventually(lambda: hosts.prefills("remote") == remote + 1, "the prefill node computes the prompt")
    assert to_decode(hosts).passed - passed > PROMPT_BYTES


@pytest.mark.parametrize("loss", [0.01, 0.03])
def test_lost_packets_never_become_tokens(hosts: Hosts, reference: Reference, loss: float) -> None:
    for path in hosts.network.wire.between("prefill", "decode"):
        path.loss, path.delay_s = loss, 0.002
    seeds = range(20, 23)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(hosts.ask, seeds))
    assert answers == [reference.answer(prompt(seed)) for seed in seeds]


def cut_in_the_middle(hosts: Hosts, seed: int, pool: ThreadPoolExecutor, *ways: tuple[str, str]) -> Future[list[int]]:
    """Starts a request and cuts these ways when some of its blocks have been sent."""
    path = to_decode(hosts)
    path.cut_after(IN_THE_MIDDLE)
    answer = pool.submit(hosts.ask, seed)
    assert path.was_cut.wait(TIMEOUT_S)
    path.cut = ("prefill", "decode") in ways
    for way in ways:
        hosts.network.wire.path(*way).cut = True
    return answer


WAYS = {
    "blocks' way": [("prefill", "decode")],
    "acknowledgements' way": [("decode", "prefill")],
    "both ways": [("prefill", "decode"), ("decode", "prefill")],
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_a_cut_in_the_middle_of_a_transfer(hosts: Hosts, reference: Reference, ways: list[tuple[str, str]]) -> None:
    remote, fallbacks = hosts.prefills("remote"), hosts.decode.metric("fallbacks_total")
    with ThreadPoolExecutor(1) as pool:
        answer = cut_in_the_middle(hosts, 30, pool, *ways)
        assert answer.result(TIMEOUT_S) == reference.answer(prompt(30))

    def fell_back() -> float:
        return hosts.decode.metric("fallbacks_total") - fallbacks

    # An engine tells its counters a little later than its answers. Without acknowledgements alone, TCP may have sent
    # all of it by then.
    if ("prefill", "decode") in ways:
        eventually(lambda: fell_back() >= 1, "its metrics say so")
    assert fell_back() <= 1
    # Each side gets its blocks back without the other.
    hosts.cluster.until_idle()
    # During the cut, the next request is answered too, without waiting for another lease to run out.
    expired = hosts.decode.metric("leases_expired_total", direction="received")
    assert hosts.ask(31) == reference.answer(prompt(31))
    assert hosts.decode.metric("leases_expired_total", direction="received") == expired
    hosts.network.wire.mend()
    eventually(lambda: hosts.ask(32) == reference.answer(prompt(32)) and hosts.prefills("remote") > remote, "healed")


def test_a_cut_that_heals_in_time_is_only_a_delay(hosts: Hosts, reference: Reference) -> None:
    """On a busy machine a cut may last for too long, and is then tried again."""
    assert any(heals_in_time(hosts, reference, seed) for seed in range(40, 60)), "no cut was short enough"


def heals_in_time(hosts: Hosts, reference: Reference, seed: int) -> bool:
    """Cuts both ways during a transfer until something is lost. Returns whether that was short enough to be judged."""
    hosts.cluster.until_idle()
    remote = hosts.prefills("remote")
    there, back = hosts.network.wire.between("prefill", "decode")
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        answer = cut_in_the_middle(hosts, seed, pool, ("prefill", "decode"), ("decode", "prefill"))
        lost = there.lost
        eventually(lambda: there.lost > lost, "something was lost")
        there.mend()
        back.mend()
        took_s = time.monotonic() - began
        assert answer.result(TIMEOUT_S) == reference.answer(prompt(seed))
    if took_s > LEASE_S / 2:
        return False
    eventually(lambda: hosts.prefills("remote") == remote + 1, "the prefill node computes the prompt")
    return True


def test_a_cut_between_two_requests(hosts: Hosts, reference: Reference) -> None:
    """Neither node can have noticed the cut when the next request comes."""
    assert hosts.ask(50) == reference.answer(prompt(50))
    remote = hosts.prefills("remote")
    for path in hosts.network.wire.between("prefill", "decode"):
        path.cut = True
    assert hosts.ask(51) == reference.answer(prompt(51))
    assert hosts.prefills("remote") == remote
    hosts.network.wire.mend()
    eventually(lambda: hosts.ask(52) == reference.answer(prompt(52)) and hosts.prefills("remote") > remote, "healed")


def test_a_client_that_leaves_while_blocks_are_on_their_way(hosts: Hosts, reference: Reference) -> None:
    path = to_decode(hosts)
    path.delay_s = 0.3
    landed = path.passed + IN_THE_MIDDLE
    with closing(open_stream(hosts.cluster, prompt(55), max_tokens=2)):
        eventually(lambda: path.passed >= landed, "some blocks are on their way")
    hosts.cluster.until_idle()
    assert path.passed < landed + PROMPT_BYTES, "and not all of them went"
    path.mend()
    remote = hosts.prefills("remote")
    assert hosts.ask(56) == reference.answer(prompt(56))
    eventually(lambda: hosts.prefills("remote") == remote + 1, "the prefill node computes the prompt")


def test_a_host_that_is_cut_off_is_dropped_and_comes_back(hosts: Hosts, reference: Reference) -> None:
    for path in hosts.network.wire.around("prefill"):
        path.cut = True
    assert hosts.ask(60) == reference.answer(prompt(60))
    eventually(lambda: hosts.names() == {"decode"}, "the proxy drops it")
    local = hosts.prefills("local")
    assert hosts.ask(61) == reference.answer(prompt(61))
    eventually(lambda: hosts.prefills("local") == local + 1, "the decode node computes the prompt itself")
    hosts.network.wire.mend()
    eventually(lambda: hosts.names() == {"prefill", "decode"}, "it is registered again")
    remote = hosts.prefills("remote")
    eventually(
        lambda: hosts.ask(62) == reference.answer(prompt(62)) and hosts.prefills("remote") > remote, "it is used"
    )


def test_a_decode_host_that_comes_back_connects_to_the_prefill_node_before_its_next_prompt(
    hosts: Hosts, reference: Reference
) -> None:
    """When the network works again, its engine tries no more by itself to reach the prefill node."""
    logged = len(hosts.decode.process.lines)
    with ThreadPoolExecutor(1) as pool:
        body = {"model": MODEL, "prompt": prompt(64)}
        lost = pool.submit(http, hosts.cluster.url + "/v1/completions", body)
        to_decode(hosts).cut_after(IN_THE_MIDDLE)
        assert to_decode(hosts).was_cut.wait(TIMEOUT_S)
        for path in hosts.network.wire.around("decode"):
            path.cut = True
        assert lost.result(TIMEOUT_S).status == 502

    def gave_up() -> bool:
        return any("cannot be connected to" in line for line in hosts.decode.process.lines[logged:])

    eventually(gave_up, "the decode node's engine gives the connection up")
    hosts.network.wire.mend()
    handshakes = hosts.decode.metric("kv_transfer_handshakes_total")
    eventually(lambda: hosts.decode.metric("kv_transfer_handshakes_total") > handshakes, "it greets the prefill node")
    remote = hosts.prefills("remote")
    assert hosts.ask(65) == reference.answer(prompt(65))
    eventually(lambda: hosts.prefills("remote") == remote + 1, "the prefill node computes the prompt")


def test_cuts_leave_nothing_open(hosts: Hosts, reference: Reference) -> None:
    wanted = reference.answer(prompt(70))

    def cut_and_heal() -> None:
        with ThreadPoolExecutor(1) as pool:
            answer = cut_in_the_middle(hosts, 70, pool, ("prefill", "decode"), ("decode", "prefill"))
            assert answer.result(TIMEOUT_S) == wanted
        hosts.cluster.until_idle()
        hosts.network.wire.mend()
        remote = hosts.prefills("remote")
        eventually(lambda: hosts.ask(70) == wanted and hosts.prefills("remote") > remote, "healed")

    cut_and_heal()  # Now everything is open that is opened only once.
    before = {node.name: (open_files(node), threads(node)) for node in hosts.cluster.nodes}
    for _ in range(2):
        cut_and_heal()
    for node in hosts.cluster.nodes:
        files, running = before[node.name]
        eventually(lambda: open_files(node) <= files, "no descriptor is left")  # noqa: B023
        assert threads(node) <= running


def test_a_prefill_host_that_dies_and_comes_back_at_the_same_address(hosts: Hosts, reference: Reference) -> None:
    """No side can say goodbye: the host is cut off before its processes are killed."""
    with ThreadPoolExecutor(1) as pool:
        answer = cut_in_the_middle(hosts, 80, pool, ("prefill", "decode"))
        for path in hosts.network.wire.around("prefill"):
            path.cut = True
        os.kill(hosts.prefill.process.pid, signal.SIGKILL)
        hosts.prefill.process.wait()
        hosts.network.wire.mend()
        hosts.relaunch("prefill")
        assert answer.result(TIMEOUT_S) == reference.answer(prompt(80))
    remote = hosts.prefills("remote")
    assert hosts.ask(81) == reference.answer(prompt(81))
    eventually(lambda: hosts.prefills("remote") == remote + 1, "the new boot is good at once")


def test_a_decode_host_that_dies_frees_the_prefill_node_and_ends_requests(hosts: Hosts, reference: Reference) -> None:
    expired = hosts.prefill.metric("leases_expired_total", direction="sent")
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(http, hosts.cluster.url + "/v1/completions", {"model": MODEL, "prompt": prompt(90)})
        to_decode(hosts).cut_after(IN_THE_MIDDLE)
        assert to_decode(hosts).was_cut.wait(TIMEOUT_S)
        for path in hosts.network.wire.around("decode"):
            path.cut = True
        os.kill(hosts.decode.process.pid, signal.SIGKILL)
        hosts.decode.process.wait()
        # Metrics are a little late: they may still say idle when the push has begun.
        eventually(
            lambda: hosts.prefill.metric("leases_expired_total", direction="sent") == expired + 1,
            "the decode node's lease has expired",
        )
        eventually(lambda: hosts.prefill.idle, "every block of the prefill node is free")
        # The proxy can notice this only by missing heartbeats.
        assert lost.result(TIMEOUT_S).status == 502
        hosts.network.wire.mend()
    hosts.relaunch("decode")
    assert hosts.ask(91) == reference.answer(prompt(91))
    # An engine tells its counters a little later than its answers.
    eventually(lambda: hosts.prefills("remote") == 1, "the prefill node has computed the prompt")
