"""Tests how the cluster handles load, bad input and clients that leave."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections import Counter
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tests.cluster.nodes import MODEL, PATIENCE_S, ServedCluster
from tests.cluster.nodes import http as call
from tests.eventually import eventually

CONTEXT = 2048
"""The model's context, in tokens."""
CLIENTS = 12
"""Clients of long prompts, which keep the prefill nodes busy together."""


def test_round_robin_shares_the_load_over_both_roles(pd_cluster: ServedCluster) -> None:
    before = {node.name: len(node.log.lines) for node in pd_cluster.decode}
    for i in range(8):
        # A decode node computes a prompt of one block itself, so this one is longer.
        pd_cluster.complete(f"Number {i} is a good number because of all that was ever said and written about it:", 2)
    seen: Counter[str] = Counter()
    for node in pd_cluster.decode:
        eventually(lambda node=node: _finished(node.log.lines[before[node.name] :]) == 4, "four lines each")  # type: ignore[misc]
        for line in node.log.lines[before[node.name] :]:
            if "pdserve.request" in line:
                seen[node.name] += 1
                found = re.search(r"prefill=(\S+)", line)
                assert found
                seen[found[1]] += 1
    assert seen == {"prefill-0": 4, "prefill-1": 4, "decode-0": 4, "decode-1": 4}


def _finished(lines: list[str]) -> int:
    return sum("pdserve.request" in line for line in lines)


def test_a_stream_with_an_interval_has_the_same_text_in_fewer_chunks(pd_cluster: ServedCluster) -> None:
    """The stream comes through the proxy, which does not know the interval."""

    def pieces(interval: int) -> list[str]:
        # Drawn tokens do not repeat: drafts that are accepted together would leave together.
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 96, "temperature": 1, "stream": True}
        body |= {"stream_interval": interval, "seed": 7, "ignore_eos": True}
        events = call(pd_cluster.url + "/v1/completions", body).body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]

    one, ten = pieces(1), pieces(10)
    assert "".join(one) == "".join(ten)
    # A busy proxy may join some of the others.
    assert len(ten) <= 12 < len(one)


def test_instances_ready_and_health(pd_cluster: ServedCluster) -> None:
    instances = call(pd_cluster.url + "/instances").json()
    assert Counter(instance["role"] for instance in instances) == {"prefill": 2, "decode": 2}
    assert len({instance["fingerprint"] for instance in instances}) == 1
    assert call(pd_cluster.url + "/health").status == 200
    for url in (pd_cluster.url, *(node.url for node in pd_cluster.nodes)):
        eventually(lambda: call(url + "/ready").status == 200, "the nodes have connected to each other")  # noqa: B023


def test_metrics_on_every_process(pd_cluster: ServedCluster) -> None:
    text = "A prompt longer than one block of sixteen tokens, which nobody sent before, so that something has to move."
    pd_cluster.complete(text, 3)
    pd_cluster.until_idle()
    assert sum(node.metric("kv_transfers_total", direction="sent") for node in pd_cluster.prefill) > 0
    assert sum(node.metric("kv_transfers_total", direction="received") for node in pd_cluster.decode) > 0
    assert sum(node.metric("generation_tokens_total") for node in pd_cluster.decode) > 0
    assert sum(node.metric("time_to_first_token_seconds_count") for node in pd_cluster.decode) > 0
    assert b"pdserve" in call(pd_cluster.url + "/metrics").body


BAD = {
    "broken JSON": (b'{"model": ', 400),
    "not an object": (b"[1]", 400),
    "wrong type of prompt": (json.dumps({"model": MODEL, "prompt": 5}).encode(), 400),
    "wrong type of temperature": (json.dumps({"model": MODEL, "prompt": "x", "temperature": "hot"}).encode(), 400),
    "negative max_tokens": (json.dumps({"model": MODEL, "prompt": "x", "max_tokens": -3}).encode(), 400),
    "max_tokens of 0": (json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 0}).encode(), 400),
    "prompt too long": (json.dumps({"model": MODEL, "prompt": [5] * 9000}).encode(), 400),
    "token id out of range": (json.dumps({"model": MODEL, "prompt": [5, 99_999_999]}).encode(), 400),
    "negative token id": (json.dumps({"model": MODEL, "prompt": [5, -1]}).encode(), 400),
    "empty prompt": (json.dumps({"model": MODEL, "prompt": ""}).encode(), 400),
    "unknown model": (json.dumps({"model": "nobody", "prompt": "x"}).encode(), 404),
    "n of 0": (json.dumps({"model": MODEL, "prompt": "x", "n": 0}).encode(), 400),
    "deep nesting": (b'{"model": "' + MODEL.encode() + b'", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_an_openai_error(pd_cluster: ServedCluster, kind: str) -> None:
    body, status = BAD[kind]
    reply = call(pd_cluster.url + "/v1/completions", raw=body)
    assert reply.status == status, reply.body
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_empty_messages(pd_cluster: ServedCluster) -> None:
    reply = call(pd_cluster.url + "/v1/chat/completions", {"model": MODEL, "messages": []})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("limit", [None, "missing"])
def test_max_tokens_null_or_missing_means_until_the_end(pd_cluster: ServedCluster, limit: str | None) -> None:
    question = [{"role": "user", "content": "again " * (CONTEXT - 100)}]
    body: dict[str, object] = {"model": MODEL, "messages": question, "temperature": 0, "ignore_eos": True}
    if limit is None:
        body |= {"max_tokens": None}
    reply = call(pd_cluster.url + "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert reply.json()["usage"]["total_tokens"] == CONTEXT


def test_internal_fields_from_clients_do_nothing(pd_cluster: ServedCluster) -> None:
    plain = pd_cluster.complete("The capital of France is", 4)
    assert pd_cluster.complete("The capital of France is", 4, kv_transfer_params={"do_remote_prefill": True}) == plain


def test_streams_are_event_streams(pd_cluster: ServedCluster) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "stream": True}
    reply = call(pd_cluster.url + "/v1/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body.endswith(b"data: [DONE]\n\n")


def open_stream(cluster: ServedCluster, prompt: list[int], max_tokens: int) -> socket.socket:
    """Sends a streamed request on a socket of its own, from which nothing has been read yet."""
    url = urlsplit(cluster.url)
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    ).encode()
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert connection.sock is not None
    return connection.sock


def test_a_client_that_leaves_while_decoding_frees_every_block(pd_cluster: ServedCluster) -> None:
    with open_stream(pd_cluster, [7] * 200, max_tokens=1800) as stream:
        seen = b""
        while seen.count(b"data:") < 3:
            seen += stream.recv(4096)
    pd_cluster.until_idle()


def test_a_client_that_leaves_during_prefill_frees_every_block(pd_cluster: ServedCluster) -> None:
    before = [node.metric("engine_steps_total") for node in pd_cluster.prefill]
    long = CONTEXT - 20
    with ExitStack() as clients:
        for first in range(CLIENTS):
            clients.enter_context(open_stream(pd_cluster, [first, *[8] * (long - 1)], max_tokens=20))
        eventually(lambda: any(node.metric("num_requests_running") for node in pd_cluster.prefill), "prefill starts")
    pd_cluster.until_idle()
    steps = sum(node.metric("engine_steps_total") for node in pd_cluster.prefill) - sum(before)
    assert steps < CLIENTS * long / 256
    pd_cluster.complete("The cluster still answers:", 2)
