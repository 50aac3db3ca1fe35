"""Tests what real processes tell of a request: one trace, one timeline, and JSON logs that all name it."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.main import main
from tests.cluster.nodes import MODEL, Cluster, cluster, http
from tests.eventually import eventually
from tests.processes import Process
from tests.tracing.receiver import ReceivedSpan, Receiver, receiver

LABEL = "chat-17/eu"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = 60
OUTPUT = 6
SECRETS = ("salt-of-mine", "word-of-mine")


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as received:
        yield received


@pytest.fixture(scope="module")
def traced(tiny_model: Path, collector: Receiver) -> Iterator[Cluster]:
    """Yields a pair behind a proxy of two processes, of which one has had a request."""
    tells = ("--otlp-endpoint", collector.url, "--log-format", "json", "--log-level", "debug")
    node = ("--dtype", "float32", "--max-num-batched-tokens", "32", "--max-num-seqs", "8", *tells)
    with cluster(tiny_model, *node, proxy_flags=("--workers", "2", *tells)) as running:
        assert complete(running, LABEL, f"00-{TRACE}-{PARENT}-01") == LABEL
        yield running


def complete(pair: Cluster, request_id: str, traceparent: str | None = None) -> str:
    """Returns the request id of a streamed answer."""
    # The prompt has several blocks that no prefix cache has, so the prefill node computes it.
    body = {
        "model": MODEL,
        "prompt": [3 + len(request_id)] * PROMPT,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": SECRETS[0],
        "stop": [SECRETS[1]],
    }
    headers = {"content-type": "application/json", "x-request-id": request_id}
    if traceparent is not None:
        headers["traceparent"] = traceparent
    request = urllib.request.Request(pair.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60.0) as response:
        assert b"[DONE]" in response.read()
        return str(response.headers["x-request-id"])


def timeline(pair: Cluster, request_id: str) -> dict[str, Any]:
    reply = http(f"{pair.url}/requests/{urllib.parse.quote(request_id, safe='')}/timeline")
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json()
    return found


def by_process(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    return {str(span.attributes["pdserve.process"]): span for span in spans if "pdserve.process" in span.attributes}


def test_one_trace_has_the_request_in_all_processes(traced: Cluster, collector: Receiver) -> None:
    processes = {"proxy", "api", "engine", "prefill_engine"}
    eventually(lambda: by_process(collector.of(TRACE)).keys() == processes, "spans of every process")
    spans = collector.of(TRACE)
    parts, by_id = by_process(spans), {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert parts["proxy"].parent == PARENT
    attempt = by_id[parts["api"].parent]
    assert (attempt.name, attempt.parent) == ("attempt", parts["proxy"].span_id)
    assert parts["engine"].parent == parts["api"].span_id
    fetch = by_id[parts["prefill_engine"].parent]
    assert (fetch.name, fetch.parent) == ("fetch", parts["engine"].span_id)
    assert fetch.attributes["pdserve.peer"] == "prefill-0"
    assert fetch.attributes["pdserve.bytes"] != 0
    nodes = {name: part.resource.get("pdserve.node") for name, part in parts.items()}
    assert nodes == {"proxy": None, "api": "decode-0", "engine": "decode-0", "prefill_engine": "prefill-0"}
    answer = parts["api"].attributes
    assert answer["gen_ai.request.model"] == MODEL
    assert (answer["gen_ai.usage.input_tokens"], answer["gen_ai.usage.output_tokens"]) == (PROMPT, OUTPUT)
    assert answer["gen_ai.response.finish_reasons"] == ["length"]
    children = {span.name: span for span in spans if span.parent == parts["prefill_engine"].span_id}
    assert children.keys() == {"queue", "prefill", "push"}
    assert set(children["prefill"].events) == {"chunk"}
    assert {span.name for span in spans if span.parent == parts["engine"].span_id} == {"queue", "fetch", "decode"}
    assert not any(span.failed for span in spans)
    assert {span.attributes["pdserve.request_id"] for span in spans} == {LABEL}


def test_nothing_of_the_request_itself_is_exported(traced: Cluster, collector: Receiver) -> None:
    sent = b"".join(collector.bodies)
    assert LABEL.encode() in sent
    assert not any(secret.encode() in sent for secret in SECRETS)


def test_the_timeline_is_the_same_whichever_process_is_asked(traced: Cluster) -> None:
    # Each question is a connection of its own, which the system gives to either worker.
    found = [timeline(traced, LABEL) for _ in range(6)]
    assert all(one["parts"][0] == found[0]["parts"][0] for one in found)
    parts = {part["process"]: part for part in found[0]["parts"]}
    assert list(parts) == ["proxy", "api", "engine", "prefill_engine"]
    assert (found[0]["finished"], found[0]["silent"]) == (True, [])
    assert (parts["proxy"]["status"], parts["proxy"]["outcome"], parts["proxy"]["start_s"]) == (200, "ok", 0.0)
    phases = {name: {phase["kind"]: phase for phase in part["phases"]} for name, part in parts.items()}
    assert phases["engine"]["fetch"]["blocks"] == phases["prefill_engine"]["push"]["blocks"] > 1
    chunks = [phase for phase in parts["prefill_engine"]["phases"] if phase["kind"] == "chunk"]
    assert len(chunks) >= 2
    assert sum(chunk["tokens"] for chunk in chunks) == PROMPT
    assert phases["engine"]["decode"]["tokens"] == OUTPUT - 1
    assert sum(parts["api"]["gaps"]["counts"]) <= OUTPUT - 1
    for name in ("api", "engine", "prefill_engine"):
        error_s = parts[name]["clock_error_s"] + 0.002
        assert 0 < parts[name]["clock_error_s"] < 2.0
        assert parts[name]["start_s"] >= -error_s
        assert parts[name]["phases"][0]["start_s"] <= found[0]["duration_s"] + error_s
    error_s = parts["engine"]["clock_error_s"] + parts["prefill_engine"]["clock_error_s"]
    assert parts["prefill_engine"]["start_s"] >= phases["engine"]["fetch"]["start_s"] - error_s


def test_the_command_draws_it(traced: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", LABEL, "--proxy-url", traced.url], {}) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith(f"{LABEL}: ok 200 in ")
    for word in ("decode-0 API process", "prefill-0 prefill engine", "fetch prefill-0", "chunks", "longest gaps"):
        assert word in drawn
    assert main(["trace", LABEL, "--proxy-url", traced.url, "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["request_id"] == LABEL


def test_the_command_draws_the_slowest(traced: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--slowest", "1", "--proxy-url", traced.url], {}) == 0
    head, row, blank, picture, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["request", "came", "at", "TTFT", "total", "outcome", "answer", "at", "prompt", "at"]
    assert row.split()[0] == picture.partition(":")[0]
    assert "ok 200" in row and "decode-0" in row and "prefill-0" in row
    assert blank == ""


def test_a_request_that_nobody_remembers_is_named(traced: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "never-seen", "--proxy-url", traced.url], {}) == 1
    assert "nobody remembers a request 'never-seen'" in capsys.readouterr().err


def test_a_client_may_leave_its_trace_out(traced: Cluster, collector: Receiver) -> None:
    trace = "ab" * 16
    complete(traced, "unsampled", f"00-{trace}-{PARENT}-00")
    complete(traced, "sampled", f"00-{trace[::-1]}-{PARENT}-01")
    eventually(lambda: len(by_process(collector.of(trace[::-1]))) == 4, "spans of the later request")
    assert collector.of(trace) == []
    assert len(timeline(traced, "unsampled")["parts"]) == 4


def test_every_line_of_every_process_is_json_and_names_the_request(traced: Cluster) -> None:
    (prefill,), (decode,) = traced.prefill, traced.decode
    wanted = {
        traced.proxy: {("worker", "pdserve_proxy.requests")},
        decode.process: {
            ("api", "pdserve.request"),
            ("engine", "pdserve.engine.step_loop"),
            ("engine", "pdserve_kvtransfer.fetch"),
        },
        prefill.process: {
            ("engine", "pdserve.engine.kv_connector.prompt_pusher"),
            ("engine", "pdserve_kvtransfer.push"),
        },
    }
    for process, writers in wanted.items():
        for kind, logger in writers:
            process.wait_for(partial(_is_from, kind, logger), 20.0)
        assert all(line["time"] and line["level"] and line["process"] for line in _lines(process))
    access = next(line for line in _lines(traced.proxy) if _names(line) and line["logger"] == "pdserve_proxy.requests")
    assert access["fields"]["status"] == 200
    assert access["fields"]["decode"] == "decode-0"
    nodes = {line["node"] for line in _lines(decode.process) if line["process"] == "engine"}
    assert nodes == {"decode-0"}


def _is_from(kind: str, logger: str, text: str) -> bool:
    line = json.loads(text)
    return line["process"] == kind and line["logger"].startswith(logger) and _names(line)


def _names(line: dict[str, Any]) -> bool:
    return bool(line.get("request_id") == LABEL)


def _lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(text) for text in process.output.splitlines()]


def test_the_last_spans_leave_when_a_process_ends(traced: Cluster, collector: Receiver) -> None:
    """It is the last test of the module: it ends a node."""
    (decode,) = traced.decode
    trace = "cd" * 16
    complete(traced, "last", f"00-{trace}-{PARENT}-01")
    decode.process.terminate()
    assert decode.process.wait() == 0
    assert {"api", "engine"} <= by_process(collector.of(trace)).keys()
