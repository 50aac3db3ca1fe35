"""Tests the routes for models, the tokenizer, probes and metrics."""

from __future__ import annotations

import importlib.metadata
import json
import re

import openai
import pytest

from pdserve.api.requests.tokenizer import Tokenizer
from tests.api.behaviour import Behaviour
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import Answer, get, post
from tests.eventually import eventually


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    assert model.model_extra == {"root": MODEL, "parent": None, "max_model_len": 256}
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("some/other")
    assert raised.value.code == "model_not_found"


def test_every_route_of_the_description_is_there(node: NodeUnderTest) -> None:
    paths = get(f"{node.url}/openapi.json").json()["paths"]
    assert "/instances" not in paths
    for path, described in paths.items():
        if "post" in described:
            assert post(node.url + path, {}).status == 400
        else:
            assert get(node.url + path.replace("{model}", MODEL)).status == 200, path


def test_the_page_of_the_routes_loads_nothing(node: NodeUnderTest) -> None:
    page = get(f"{node.url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for text in ("/v1/chat/completions", "max_output_tokens", "stop_sequences"):
        assert text in page.text
    assert not {"<script", "<link", "<img", "http:", "https:"} & set(
        re.findall(r"<script|<link|<img|https?:", page.text)
    )


def test_what_serves_is_told(node: NodeUnderTest) -> None:
    info = get(f"{node.url}/server_info").json()
    assert (info["process"], info["role"], info["model"], info["max_model_len"]) == ("node", "mixed", MODEL, 256)


def test_models_with_a_slash(node: NodeUnderTest) -> None:
    assert get(f"{node.url}/v1/models/").json() == get(f"{node.url}/v1/models").json()


def test_tokenize_and_back(node: NodeUnderTest, tokenizer: Tokenizer) -> None:
    answer = post(f"{node.url}/tokenize", {"model": MODEL, "prompt": "Hello, 漢字"}).json()
    assert answer["tokens"] == tokenizer.encode("Hello, 漢字", add_special_tokens=True)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert post(f"{node.url}/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hello, 漢字"}


def test_tokens_as_the_vocabulary_spells_them(node: NodeUnderTest) -> None:
    body = {"model": MODEL, "prompt": "Hello world"}
    assert post(f"{node.url}/tokenize", body).json()["token_strs"] is None
    answer = post(f"{node.url}/tokenize", {**body, "return_token_strs": True}).json()
    assert answer["token_strs"] == ["Hello", "Ġworld"]


def test_tokenize_chat_is_what_the_engine_gets(node: NodeUnderTest) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with node.new_submits() as submits:
        post(f"{node.url}/v1/chat/completions", {"model": MODEL, "messages": messages, "seed": 0})
    assert post(f"{node.url}/tokenize", {"messages": messages}).json()["tokens"] == submits()[0].token_ids


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("detokenize", {"tokens": [49_152]}, 400, "tokens"),
        ("detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("tokenize", {"messages": [{}] * 4_097}, 400, "messages"),
    ],
)
def test_tokenizer_refusals(route: str, body: dict[str, object], status: int, param: str, node: NodeUnderTest) -> None:
    answer = post(f"{node.url}/{route}", body)
    assert (answer.status, answer.json()["error"]["param"]) == (status, param)


def test_the_tokeniser_is_told_to_clients_and_to_proxies(node: NodeUnderTest, tokenizer: Tokenizer) -> None:
    url = f"{node.url}/tokenizer_info"
    info = get(url).json()
    assert (info["model_max_length"], info["eos_token"]) == (256, "<|im_end|>")
    assert info["chat_template"] == tokenizer.chat_template
    assert info["added_tokens_decoder"]["2"] == {
        "content": "<|im_end|>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    assert get(f"{url}?model={MODEL}").json() == post(url, {"model": MODEL}).json() == info
    assert get(f"{url}?model=other").status == post(url, {"model": "other"}).status == 404


def test_detokenize_counts_before_it_reads(node: NodeUnderTest) -> None:
    assert post(f"{node.url}/detokenize", {"tokens": [17] * 256}).status == 200
    answer = post(f"{node.url}/detokenize", {"tokens": [49_152] * 257})
    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_probes(node: NodeUnderTest) -> None:
    for path, status in (("live", "live"), ("health", "healthy"), ("ping", "healthy"), ("ready", "ready")):
        answer = get(f"{node.url}/{path}")
        assert (answer.status, answer.json()) == (200, {"status": status})
        assert answer.headers["x-request-id"]
    assert get(f"{node.url}/version").json() == {"version": importlib.metadata.version("pdserve")}


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("a b", False), ("x" * 129, False), ("", False)])
def test_request_ids(given: str, kept: bool, node: NodeUnderTest) -> None:
    shown = get_with_id(node, given)
    assert (shown == given) is kept
    assert 1 <= len(shown) <= 128


def get_with_id(node: NodeUnderTest, request_id: str) -> str:
    return post(f"{node.url}/v1/completions", {}, x_request_id=request_id).headers["x-request-id"]


def metrics(node: NodeUnderTest) -> dict[str, float]:
    lines = [line for line in get(f"{node.url}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def first_tokens(stream: Answer) -> list[int]:
    """Returns how many tokens each choice's first chunk has: more than one where the node read them late."""
    first: dict[int, int] = {}
    for line in stream.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                first.setdefault(choice["index"], len(choice.get("token_ids", ())))
    return list(first.values())


def test_metrics_count_requests(node: NodeUnderTest) -> None:
    before = metrics(node)
    body = {"model": MODEL, "prompt": "x"}
    streamed = {**body, "stream": True, "return_token_ids": True}
    reply = post(f"{node.url}/v1/completions", {**streamed, "seed": Behaviour.REPLY})
    endless = post(f"{node.url}/v1/completions", {**streamed, "seed": Behaviour.ENDLESS, "max_tokens": 4, "n": 2})
    post(f"{node.url}/v1/completions", {**body, "seed": Behaviour.ERROR})
    first = [*first_tokens(reply), *first_tokens(endless)]
    assert len(first) == 3

    def grown(name: str) -> float:
        return metrics(node)[name] - before[name]

    assert eventually(lambda: grown("pdserve_e2e_request_latency_seconds_count") == 3)
    assert grown('pdserve_request_success_total{finished_reason="stop"}') == 1
    assert grown('pdserve_request_success_total{finished_reason="length"}') == 2
    assert grown('pdserve_request_failure_total{reason="error"}') == 1
    assert grown("pdserve_time_to_first_token_seconds_count") == 2
    # There is a gap before each token but those that came first.
    assert grown("pdserve_inter_token_latency_seconds_count") == 9 + 2 * 4 - sum(first)
    assert grown("pdserve_request_queue_time_seconds_count") == 4
    assert grown("pdserve_request_queue_time_seconds_sum") == pytest.approx(0.04)
    assert grown("pdserve_request_prefill_time_seconds_count") == 4
    assert grown("pdserve_kv_transfer_tail_seconds_count") == 4
    assert grown("pdserve_kv_transfer_tail_seconds_sum") == pytest.approx(0.02)
    assert grown("pdserve_request_decode_time_seconds_count") == 2
    assert grown("pdserve_generation_tokens_total") == 9 + 2 * 4
    histograms = {
        "request_prompt_tokens": (3, 3),  # "x" is one token
        "request_params_n": (3, 1 + 2 + 1),
        "request_generation_tokens": (3, 9 + 2 * 4),
        "request_max_num_generation_tokens": (2, 9 + 4),
    }
    for name, (count, total) in histograms.items():
        for prefix, labels in (("pdserve_", ""), ("vllm:", f'{{engine="0",model_name="{MODEL}"}}')):
            assert grown(f"{prefix}{name}_count{labels}") == count, name
            assert grown(f"{prefix}{name}_sum{labels}") == total, name
    assert grown("pdserve_request_params_max_tokens_count") == 3
    assert grown("pdserve_request_inference_time_seconds_count") == 2
    assert grown("pdserve_request_time_per_output_token_seconds_count") == 2
    for reason, count in (("stop", 1), ("length", 2), ("error", 1), ("abort", 0)):
        name = f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{MODEL}"}}'
        assert grown(name) == count, reason


def test_metrics_show_the_engine(node: NodeUnderTest) -> None:
    post(f"{node.url}/v1/completions", {"model": MODEL, "prompt": "x", "seed": 0})
    shown = metrics(node)
    assert shown["pdserve_num_preemptions_total"] == 4
    assert shown['pdserve_kv_transfer_failures_total{reason="peer_lost"}'] == 2
    assert shown['pdserve_leases_expired_total{direction="received"}'] == 1
    assert shown['pdserve_leases_expired_total{direction="sent"}'] == 0
    assert 0 <= shown["pdserve_kv_cache_usage_perc"] <= 1
    assert shown['pdserve_placement_total{reason="sooner",source="remote"}'] == 5
    assert shown["pdserve_prefill_local_tokens_per_second"] == 1600
    assert shown['pdserve_prefill_remote_tokens_per_second{node="prefill-7"}'] == 1700
    assert shown['pdserve_prefill_remote_queued_tokens{node="prefill-7"}'] == 512
    assert shown['pdserve_prefill_remote_overhead_seconds{node="prefill-7"}'] == 0.004
    assert shown['pdserve_prefill_remote_transfer_bytes_per_second{node="prefill-7"}'] == 3e9
    assert shown["pdserve_placement_last_local_seconds"] == 0.75
    assert shown["pdserve_itl_target_seconds"] == 0.05
    assert shown["pdserve_shared_steps_total"] == 3
    assert shown["pdserve_shared_steps_prompt_tokens_total"] == 48
    assert shown["pdserve_shared_steps_late_total"] == 1
    assert shown['pdserve_step_part_seconds{part="batch"}'] == 0.012
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens_total",
        "fallbacks_total",
        "quarantined_blocks",
        'kv_transfer_bytes_total{direction="sent"}',
        "kv_transfer_seconds_total",
        "kv_transfer_handshakes_total",
        "kv_transfer_frames_dropped_total",
        "kv_transfer_clock_skew_seconds",
        'prefills_total{source="remote"}',
    ):
        assert f"pdserve_{name}" in shown


def test_each_request_has_one_log_line(node: NodeUnderTest) -> None:
    body = {"model": MODEL, "prompt": "x", "seed": 0, "n": 2}
    post(f"{node.url}/v1/completions", body, x_request_id="log-me-1")
    line = node.process.wait_for(lambda line: "request_id=log-me-1" in line, 5)
    fields = dict(field.split("=", 1) for field in line.split() if "=" in field)
    assert fields["prefill"] == "prefill-7"
    assert fields["decode"].startswith("mixed-127.0.0.1:")
    assert (fields["prompt"], fields["cached"], fields["output"]) == ("1", "6", "18")
    assert (fields["queue_ms"], fields["finish"], fields["source"]) == ("10.0", "stop", "remote")
    assert 0 < float(fields["ttft_ms"]) <= float(fields["total_ms"])
    assert float(fields["tpot_ms"]) > 0
    assert all(float(fields[name]) > 0 for name in ("prompt_tok_s", "output_tok_s", "total_tok_s"))
    assert sum("request_id=log-me-1" in line for line in node.process.lines) == 1
