"""Tests where a decode node has its prompts computed with --disaggregation auto, on real nodes with a core each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.nodes import Cluster, Node, cluster, http, one_core, start_node
from tests.cluster.test_cluster import open_stream
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid
from tests.tiny_models import Reference

STREAMS = 3
PROMPT = 600


def prompt(first: int) -> list[int]:
    """Returns a prompt that no prefix cache has."""
    return [first, *range(1000, 1000 + PROMPT - 1)]


def decisions(node: Node, source: str, reason: str) -> float:
    return node.metric("placement_total", reason=reason, source=source)


@contextmanager
def streams(running: Cluster) -> Iterator[None]:
    """Keeps several answers decoding. Their own prompts are too short to be transferred."""
    decode = running.decode[0]
    with ExitStack() as stack:
        for i in range(STREAMS):
            stack.enter_context(open_stream(running, [20 + i, 9, 9], max_tokens=2000))
        eventually(lambda: decode.metric("num_requests_running") == STREAMS, "all streams decode")
        yield
    running.until_idle()


def test_prompts_beside_streams_go_to_a_prefill_node_that_is_in_time(slow_tiny_model: Path) -> None:
    # A prefill node that is stopped while it fetches an answer's blocks would never be idle.
    flags = ("--disaggregation", "auto", "--kv-return", "off", "--target-ttft-ms", "600000")
    # The node whose engine is stopped stays, so that it is the decode node that has to do without it.
    stays = ("--engine-silence-ms", "600000")
    with cluster(slow_tiny_model, *flags, *stays, forked=True) as running, ThreadPoolExecutor(1) as pool:
        decode, prefill = running.decode[0], running.prefill[0]
        eventually(lambda: http(running.url + "/ready").status == 200, "the nodes have met")
        for node in running.nodes:
            eventually(lambda: node.metric("kv_transfer_handshakes_total") == 2, "one each way, before any request")  # noqa: B023

        running.complete(prompt(1), 2)
        eventually(lambda: decisions(decode, "remote", "probe") == 1, "a node of which nothing is known is tried")

        with streams(running):
            running.complete(prompt(2), 2)
            eventually(lambda: decisions(decode, "remote", "target") == 1, "streams are spared")
            assert decisions(decode, "local", "short") == STREAMS
        assert decode.metric("prefill_local_tokens_per_second") == 0, "no prompt worth measuring was computed here"
        assert decode.metric("prefill_remote_tokens_per_second", node=prefill.name) > 0
        assert decode.metric("placement_last_local_seconds") > 0 < decode.metric("placement_last_remote_seconds")

        running.complete(prompt(3), 2)
        eventually(lambda: decisions(decode, "local", "sooner") == 1, "nobody is disturbed, and nothing to be moved")
        eventually(lambda: decode.metric("prefill_local_tokens_per_second") > 0, "now it is measured")

        os.kill(engine_pid(prefill), signal.SIGSTOP)
        try:
            with streams(running):
                hung = pool.submit(running.complete, prompt(4), 2)
                assert len(hung.result(60)) == 2
                eventually(lambda: decode.metric("fallbacks_total") == 1, "it was remote, and in vain")
                assert decode.metric("prefills_failed_total", reason="lease_expired") == 1
                assert len(running.complete(prompt(5), 2)) == 2
                eventually(lambda: decisions(decode, "local", "failed") == 1, "not again, streams or not")
            # Nothing but the bound ends the wait of a node that joins now.
            never = ("--transfer-lease-ms", "600000")
            more = (*flags, *never, *one_core(1))
            with start_node("decode", "late", slow_tiny_model, running, *more, forked=True) as late:
                url = late.listening().url
                eventually(lambda: http(url + "/ready").status == 200, "it waits for no node that hangs")
                assert http(running.url + "/ready").status == 200
        finally:
            os.kill(engine_pid(prefill), signal.SIGCONT)
        running.until_idle()
        assert http(running.url + "/ready").status == 200


def test_a_decode_node_computes_what_a_busy_prefill_node_cannot(tiny_model: Path) -> None:
    """No first token is in time here, so each prompt goes where it is sooner. The tokens are the same from anywhere."""
    prompts = [prompt(3 + number) for number in range(12)]
    reference = Reference(tiny_model, 4)
    flags = ("--disaggregation", "auto", "--dtype", "fp32", "--target-ttft-ms", "0.001")
    with cluster(tiny_model, *flags, forked=True) as running, ThreadPoolExecutor(len(prompts)) as pool:
        (decode,) = running.decode
        running.complete(prompt(1), 2)
        answers = list(pool.map(lambda ids: running.complete(ids, 4, ignore_eos=True), prompts))
        assert answers == [reference.answer(ids) for ids in prompts]
        places = [decisions(decode, source, "sooner") for source in ("local", "remote")]
        assert sum(places) == len(prompts) and min(places) > 0, places
        assert decode.metric("fallbacks_total") == 0
        running.until_idle()
