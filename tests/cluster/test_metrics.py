"""Tests the metrics of a real cluster: what dashboards made for vLLM query, processes, and prompts that move."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.cluster.nodes import MODEL, ServedCluster, ServedNode, http

PROMPT = "Metrics count the tokens of a prompt once, wherever in a cluster they were computed, said the engineer, and "
MOVED = "prompts whose KV cache moves are counted by the node that answers, and by no other one, he went on to say."

QUERIED_HISTOGRAMS = (
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "vllm:iteration_tokens_total",
)
"""Histograms that the dashboards in vLLM's repository and those that others have made of them query.

Those of before 2025 also query vllm:num_requests_swapped and vllm:cpu_cache_usage_perc, which vLLM has no more.
"""
QUERIED: dict[str, tuple[str, ...]] = {
    "vllm:prompt_tokens_total": (),
    "vllm:prompt_tokens_by_source_total": ("source",),
    "vllm:generation_tokens_total": (),
    "vllm:request_success_total": ("finished_reason",),
    "vllm:num_preemptions_total": (),
    "vllm:prefix_cache_queries_total": (),
    "vllm:prefix_cache_hits_total": (),
    "vllm:gpu_prefix_cache_queries_total": (),
    "vllm:gpu_prefix_cache_hits_total": (),
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_waiting_by_reason": ("reason",),
    "vllm:engine_sleep_state": ("sleep_state",),
    "vllm:kv_cache_usage_perc": (),
    "vllm:gpu_cache_usage_perc": (),
}
"""What else they query, with the labels by which they tell series apart, beside the model's and the engine's."""

COUNTED = (
    "prompt_tokens_total",
    "prompt_tokens_computed_total",
    "request_prompt_tokens_sum",
    "generation_tokens_total",
)


def families(url: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(http(url + "/metrics").body.decode())}


def samples(url: str) -> list[Sample]:
    return [sample for family in families(url).values() for sample in family.samples]


def total(nodes: Sequence[ServedNode], name: str, **labels: str) -> float:
    return sum(
        sample.value
        for node in nodes
        for sample in samples(node.url)
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_what_dashboards_made_for_vllm_query_is_there(pd_cluster: ServedCluster) -> None:
    generated = len(pd_cluster.complete(PROMPT, 5))
    pd_cluster.until_idle()
    for node in pd_cluster.decode:
        shown = samples(node.url)
        queried = dict(QUERIED)
        for name in QUERIED_HISTOGRAMS:
            queried |= {f"{name}_sum": (), f"{name}_count": (), f"{name}_bucket": ("le",)}
        for name, labels in queried.items():
            found = [sample for sample in shown if sample.name == name]
            assert found, name
            for sample in found:
                assert sample.labels.keys() == {"model_name", "engine", *labels}, name
                assert sample.labels["model_name"] == MODEL
                assert sample.labels["engine"] == "0"
        assert {s.labels["finished_reason"] for s in shown if s.name == "vllm:request_success_total"} == {
            "stop",
            "length",
            "abort",
            "error",
        }
    for name in QUERIED_HISTOGRAMS:
        assert total(pd_cluster.decode, f"{name}_count") > 0, name
    assert total(pd_cluster.decode, "vllm:generation_tokens_total") >= generated
    assert total(pd_cluster.decode, "vllm:request_success_total", finished_reason="length") > 0


def test_a_prompt_that_moves_is_counted_by_the_node_that_answers(pd_cluster: ServedCluster) -> None:
    def counted(nodes: Sequence[ServedNode]) -> list[float]:
        pd_cluster.until_idle()
        return [total(nodes, f"pdserve_{name}") for name in COUNTED]

    def moved() -> float:
        return total(pd_cluster.decode, "pdserve_prompt_tokens_by_source_total", source="external_kv_transfer")

    decoded, prefilled, before = counted(pd_cluster.decode), counted(pd_cluster.prefill), moved()
    body = {"model": MODEL, "prompt": MOVED, "max_tokens": 2, "ignore_eos": True}
    reply = http(pd_cluster.url + "/v1/completions", body)
    tokens = reply.json()["usage"]["prompt_tokens"]
    assert tokens > 16
    grown = [new - old for new, old in zip(counted(pd_cluster.decode), decoded, strict=True)]
    assert grown == [tokens, 0, tokens, 2]
    grown = [new - old for new, old in zip(counted(pd_cluster.prefill), prefilled, strict=True)]
    assert grown == [0, tokens, 0, 0]
    assert moved() - before == tokens
    for nodes in (pd_cluster.decode, pd_cluster.prefill):
        assert total(nodes, "pdserve_kv_transfer_handshakes_total") >= 1
        assert total(nodes, "pdserve_kv_transfer_frames_dropped_total") == 0
        assert 0 <= abs(total(nodes, "pdserve_kv_transfer_clock_skew_seconds")) < 10, "they share a clock"


def test_every_process_shows_what_it_takes_and_which_software_it_is(pd_cluster: ServedCluster) -> None:
    node = pd_cluster.decode[0]
    shown = families(node.url)
    for name in ("process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds", "process_threads"):
        values = {sample.labels["process"]: sample.value for sample in shown[name].samples}
        # Another test may have sent a grammar.
        assert {"api", "engine"} <= values.keys() <= {"api", "engine", "grammars"}
        assert all(value > 0 for value in values.values())
    (build,) = shown["pdserve_build_info"].samples
    assert build.labels.keys() == {"version", "python", "torch", "ucx", "transports", "kernels"}
    assert all(build.labels[name] for name in ("version", "python", "torch", "ucx", "kernels"))


def test_promtool_finds_nothing_to_say(pd_cluster: ServedCluster) -> None:
    """It objects to the colons of vLLM's names, and to three of its endings. Everything else is pdserve's."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian has it in the package prometheus")
    for url in (pd_cluster.decode[0].url, pd_cluster.url):
        text = http(url + "/metrics").body
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=30)
        said = (checked.stdout + checked.stderr).decode().splitlines()
        assert [line for line in said if not line.startswith("vllm:")] == []
        assert checked.returncode in (0, 3)  # 3: it has said something
