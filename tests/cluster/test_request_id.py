"""Tests that a client's request id is in the log of every process that the request reaches."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.cluster.nodes import MODEL, Log, ServedCluster


def complete(pair: ServedCluster, request_id: str) -> str:
    """Returns the request id of the answer to a request with this id."""
    # The prompt has several blocks that no prefix cache has, so the prefill node computes it.
    prompt = [3 + len(request_id)] * 60
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "n": 2}
    headers = {"content-type": "application/json", "x-request-id": request_id}
    request = urllib.request.Request(pair.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60.0) as response:
        assert len(json.loads(response.read())["choices"]) == 2
        return str(response.headers["x-request-id"])


def wait_for_line(process: Log, logger: str, request_id: str) -> None:
    words = (f" {logger}", f"request_id={request_id} ")
    process.wait_for(lambda line: all(word in line for word in words), 20.0)


def test_one_grep_finds_a_request_in_every_process(tiny_pair: ServedCluster) -> None:
    label = "chat-17/eu"
    assert complete(tiny_pair, label) == label
    (prefill,), (decode,) = tiny_pair.prefill, tiny_pair.decode
    wait_for_line(tiny_pair.proxy, "pdserve_proxy.requests", label)
    wait_for_line(decode.log, "pdserve.request", label)
    wait_for_line(decode.log, "pdserve.engine.step_loop", label)
    wait_for_line(decode.log, "pdserve.engine.kv_connector", label)
    wait_for_line(decode.log, "pdserve_kvtransfer.fetch", label)
    wait_for_line(prefill.log, "pdserve.engine.kv_connector", label)
    wait_for_line(prefill.log, "pdserve_kvtransfer.push", label)

    def finishes(line: str) -> bool:
        return f"request_id={label} " in line and "outcome=done" in line

    # The push ends a moment after the decode node has all it needs to answer.
    prefill.log.wait_for(finishes, 20.0)
    finished = [line for line in prefill.log.lines if finishes(line)]
    assert [line.split()[2] for line in finished] == ["INFO"]


@pytest.mark.parametrize("forged", ["mine outcome=ok", "x" * 129])
def test_a_label_that_could_forge_a_log_line_is_replaced(forged: str, tiny_pair: ServedCluster) -> None:
    label = complete(tiny_pair, forged)
    assert label != forged
    (prefill,), (decode,) = tiny_pair.prefill, tiny_pair.decode
    for process in (tiny_pair.proxy, decode.log, prefill.log):
        process.wait_for(lambda line: f"request_id={label} " in line, 20.0)
        assert forged not in process.output
