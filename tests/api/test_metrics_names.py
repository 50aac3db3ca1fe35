"""Tests under which names a node shows its metrics, and that both names show the same counts."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from pdserve.api.generation.request_log import ChoiceOutcome
from pdserve.api.node.node_metrics import OTHER_NAMES, SAME_NAMES, MetricsScale, NodeMetrics
from pdserve.config import MetricsNames
from pdserve.wire.engine import EngineStats
from pdserve.wire.engine_counts import CacheStats, SchedulerCounts

STATS = EngineStats(
    cache=CacheStats(total_blocks=8, free_blocks=2),
    scheduler=SchedulerCounts(prompt_tokens=50, cached_prompt_tokens=16, preemptions=3),
)
MODEL = 'a "model"\\of mine'


def shown(names: MetricsNames, scale: MetricsScale = MetricsScale()) -> dict[str, Metric]:  # noqa: B008  # frozen
    metrics = NodeMetrics(lambda: STATS, MODEL, scale, names)
    for outcome in ChoiceOutcome:
        metrics.requests.choice_ended(outcome, None, 7)
    text = asyncio.run(metrics.render()).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_each_name_can_be_left_out() -> None:
    both, own, theirs = map(shown, (MetricsNames.BOTH, MetricsNames.PDSERVE, MetricsNames.VLLM))
    assert {name for name in own if name.startswith("vllm:")} == set()
    assert both.keys() == own.keys() | theirs.keys()
    # vLLM has no metric for failures or for what pdserve alone does.
    assert {"pdserve_request_failure", "pdserve_prefills", "pdserve_kv_transfers"} <= theirs.keys()
    assert {f"pdserve_{name}" for name in {*SAME_NAMES, *OTHER_NAMES}} == own.keys() - theirs.keys()


def test_both_names_show_the_same() -> None:
    both = shown(MetricsNames.BOTH)
    for own, theirs in [*((name, name) for name in SAME_NAMES), *((o, t) for o, ts in OTHER_NAMES.items() for t in ts)]:
        ours, renamed = both[f"pdserve_{own}"], both[f"vllm:{theirs}"]
        assert renamed.type == ours.type
        labels = {"model_name": MODEL, "engine": "0"}
        assert [(sample.labels, sample.value) for sample in renamed.samples] == [
            ({**labels, **sample.labels}, sample.value) for sample in ours.samples
        ], own
    assert both["vllm:kv_cache_usage_perc"].samples[0].value == 0.75
    endings = {sample.labels["finished_reason"]: sample.value for sample in both["vllm:request_success"].samples}
    assert endings == {"stop": 2, "length": 1, "error": 2, "abort": 1}


@pytest.mark.parametrize("timeout_s", [60.0, 3000.0])
def test_buckets_reach_the_timeout_and_the_longest_context(timeout_s: float) -> None:
    both = shown(MetricsNames.BOTH, MetricsScale(timeout_s, max_model_len=9000))

    def last(name: str) -> float:
        return max(
            float(sample.labels["le"]) for sample in both[name].samples if sample.labels.get("le", "+Inf") != "+Inf"
        )

    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_decode_time_seconds"):
        assert last(f"vllm:{name}") == last(f"pdserve_{name}") >= timeout_s
    assert last("vllm:request_generation_tokens") == 10_000
