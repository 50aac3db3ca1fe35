"""Shows metrics under the names and labels that vLLM's dashboards query, from the same counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.api.generation.outcome import ChoiceOutcome
from pdserve.config import MetricsNames

ENGINE = "0"
"""The ``engine`` label: vLLM numbers the engines behind one server, and a node has one."""

SAME_NAMES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
OTHER_NAMES = {
    "iteration_tokens": ("iteration_tokens_total",),
    # Names that vLLM has given up, and that many dashboards still query.
    "inter_token_latency_seconds": ("time_per_output_token_seconds",),
    "kv_cache_usage_perc": ("gpu_cache_usage_perc",),
    "prefix_cache_queries": ("gpu_prefix_cache_queries",),
    "prefix_cache_hits": ("gpu_prefix_cache_hits",),
}
ENDINGS = {
    ChoiceOutcome.STOP: "stop",
    ChoiceOutcome.LENGTH: "length",
    ChoiceOutcome.TOOL_CALLS: "stop",
    ChoiceOutcome.DEADLINE: "error",
    ChoiceOutcome.ERROR: "error",
    ChoiceOutcome.ABORT: "abort",
}
"""The ``finished_reason`` under which vLLM's metric counts each outcome. It counts failures, too."""
WAITING_REASONS = {"num_requests_waiting": "capacity", "num_requests_waiting_for_remote_kvs": "deferred"}
"""The ``reason`` that vLLM gives for what our gauges count."""
SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
"""An engine of pdserve never sleeps in vLLM's sense. Without this metric vLLM's dashboard shows it as down."""


class VllmNames(Collector):
    """Collects from others, and shows what vLLM has too under its names, under pdserve's, or under both."""

    def __init__(self, collectors: Sequence[Collector], model: str, names: MetricsNames) -> None:
        self._collectors = collectors
        self._labels = {"model_name": model, "engine": ENGINE}
        self._names = names

    def collect(self) -> Iterable[Metric]:
        endings = dict.fromkeys(ENDINGS.values(), 0.0)
        waiting = dict.fromkeys(WAITING_REASONS.values(), 0.0)
        for metric in (metric for collector in self._collectors for metric in collector.collect()):
            name = metric.name.removeprefix("pdserve_")
            theirs = self._named(metric, name)
            if self._names is not MetricsNames.VLLM or not theirs:
                yield metric
            if self._names is not MetricsNames.PDSERVE:
                yield from theirs
            if name in ("request_success", "request_failure"):
                for sample in metric.samples:
                    (outcome,) = sample.labels.values()
                    endings[ENDINGS[ChoiceOutcome(outcome)]] += sample.value
            if name in WAITING_REASONS:
                waiting[WAITING_REASONS[name]] = metric.samples[0].value
        if self._names is not MetricsNames.PDSERVE:
            yield self._success(endings)
            yield self._gauge("num_requests_waiting_by_reason", "requests that wait", "reason", waiting)
            yield self._gauge("engine_sleep_state", "whether the engine sleeps", "sleep_state", SLEEP_STATES)

    def _named(self, metric: Metric, name: str) -> list[Metric]:
        """Returns the metric under each name that vLLM has for it."""
        names = ((name,) if name in SAME_NAMES else ()) + OTHER_NAMES.get(name, ())
        return [_renamed(metric, f"vllm:{their_name}", self._labels) for their_name in names]

    def _gauge(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", documentation, labels=[*self._labels, label])
        for value, number in values.items():
            family.add_metric([*self._labels.values(), value], number)
        return family

    def _success(self, endings: dict[str, float]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "choices that ended", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in endings.items():
            family.add_metric([*self._labels.values(), reason], count)
        return family


def _renamed(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        renamed.add_sample(name + sample.name.removeprefix(metric.name), labels | sample.labels, sample.value)
    return renamed
