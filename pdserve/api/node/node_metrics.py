"""Everything that a node's ``/metrics`` shows, under pdserve's names, vLLM's, or both.

``RequestMetrics`` counts what the API process observes of requests. ``EngineCollector`` shows what the engine counts,
which it sends as totals, without counting it again. ``VllmNames`` shows the same counts under the names and labels that
vLLM's dashboards query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, get_args, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve.api.generation.request_log import ChoiceOutcome, RequestRecord
from pdserve.api.requests.prompts import Prompt
from pdserve.config import MetricsNames
from pdserve.metrics import BucketCounts, seconds_to, text_of, tokens_to
from pdserve.wire.discovery import GapCounts
from pdserve.wire.engine import (
    STEP_TOKEN_BOUNDS,
    EngineStats,
    PrefillNodeStats,
    PrefillReason,
    PrefillSource,
    PrefillStats,
    RequestReport,
    StepStats,
)
from pdserve.wire.engine_counts import MetricKind, ShownAs

_DECIDED = (PrefillSource.LOCAL, PrefillSource.REMOTE)
"""The sources that a decision may name: a fallback is none's decision."""

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


class EngineCollector(Collector):
    """Shows the engine's own counters, which it sends as totals, without counting them again."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from _shown_fields(stats)
        yield from _derived(stats)
        yield from _prefill(stats.prefill)
        yield from _steps(stats.step)


def _shown_fields(stats: EngineStats) -> Iterable[Metric]:
    """Returns the metrics that fields name (``ShownAs``). Fields of one name are the values of its label."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for shown, value in _fields(stats):
        if shown.name not in families:
            kind = CounterMetricFamily if shown.kind is MetricKind.COUNTER else GaugeMetricFamily
            families[shown.name] = kind(
                f"pdserve_{shown.name}", shown.help, labels=[shown.label] if shown.label else []
            )
        if shown.label and not shown.value:
            numbers = msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        else:
            numbers = {shown.value: value}
        for each, number in numbers.items():
            families[shown.name].add_metric([each] if shown.label else [], number)
    return families.values()


def _fields(stats: msgspec.Struct) -> Iterable[tuple[ShownAs, Any]]:
    """Yields the fields that name a metric, those of nested structs too, with their values."""
    for name, shown in _annotations(type(stats)):
        value = getattr(stats, name)
        if shown is not None:
            yield shown, value
        elif isinstance(value, msgspec.Struct):
            yield from _fields(value)


@cache
def _annotations(kind: type[msgspec.Struct]) -> tuple[tuple[str, ShownAs | None], ...]:
    hints = get_type_hints(kind, include_extras=True)
    found = {name: [each for each in get_args(hint)[1:] if isinstance(each, ShownAs)] for name, hint in hints.items()}
    return tuple((name, found[name][0] if found[name] else None) for name in kind.__struct_fields__)


def _derived(stats: EngineStats) -> Iterable[Metric]:
    """Yields what follows from several fields. The sources of prompts' tokens have vLLM's names."""
    cache, counts = stats.cache, stats.scheduler
    yield _gauge("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1", cache.used)
    cached, transferred = counts.cached_prompt_tokens, counts.transferred_prompt_tokens
    yield _counter("prompt_tokens_cached", "those of them that were not computed here", cached + transferred)
    sources = CounterMetricFamily(
        "pdserve_prompt_tokens_by_source",
        "tokens of prompts that are answered here, by where their KV cache came from",
        labels=["source"],
    )
    sources.add_metric(["local_compute"], counts.prompt_tokens - cached - transferred)
    sources.add_metric(["local_cache_hit"], cached)
    sources.add_metric(["external_kv_transfer"], transferred)
    yield sources
    fallbacks = stats.prefills.get(PrefillSource.FALLBACK.value, 0)
    yield _counter("fallbacks", "prompts computed here because a prefill node failed", fallbacks)


def _prefill(stats: PrefillStats) -> Iterable[Metric]:
    """Yields the choices between local and remote prefill, and what is known of each prefill node."""
    decisions = CounterMetricFamily(
        "pdserve_placement", "prompts, by where they went and why", labels=["source", "reason"]
    )
    made = {(source, reason): 0 for source in _DECIDED for reason in PrefillReason}
    made |= {(decision.source, decision.reason): decision.count for decision in stats.decisions}
    for (source, reason), count in made.items():
        decisions.add_metric([source.value, reason.value], count)
    yield decisions
    gauges: dict[str, tuple[str, Callable[[PrefillNodeStats], float]]] = {
        "remote_tokens_per_second": ("rate of prompts on a prefill node", lambda node: node.tokens_per_s),
        "remote_queued_tokens": ("of prompts before a prefill node", lambda node: node.queued_tokens),
        "remote_overhead_seconds": ("of a first token, beside queue and rate", lambda node: node.overhead_s),
        "remote_transfer_bytes_per_second": ("of KV blocks from a prefill node", lambda node: node.bytes_per_s),
    }
    for name, (help, value) in gauges.items():
        family = GaugeMetricFamily(f"pdserve_prefill_{name}", help, labels=["node"])
        for node in stats.nodes:
            family.add_metric([node.name], value(node))
        yield family


def _steps(stats: StepStats) -> Iterable[Metric]:
    """Yields how many tokens the steps had."""
    steps = HistogramMetricFamily("pdserve_iteration_tokens", "tokens of a step, of prompts and answers")
    bounds = [*map(floatToGoString, STEP_TOKEN_BOUNDS), "+Inf"]
    steps.add_metric([], list(zip(bounds, accumulate(stats.num_tokens), strict=True)), stats.tokens)
    yield steps


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pdserve_{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"pdserve_{name}", help, value=value)


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


_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TAIL_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class MetricsScale:
    """What bounds a node's histograms."""

    timeout_s: float = 600.0
    max_model_len: int = 4096


class RequestMetrics(Collector):
    """What the API process counts of requests. One thread counts and collects."""

    def __init__(self, scale: MetricsScale) -> None:
        seconds, tokens = seconds_to(scale.timeout_s), tokens_to(scale.max_model_len)
        self._ttft, self._e2e = BucketCounts(seconds), BucketCounts(seconds)
        self._queue, self._prefill, self._decode = BucketCounts(seconds), BucketCounts(seconds), BucketCounts(seconds)
        self._inference = BucketCounts(seconds)
        self._itl, self._tpot, self._tail = map(BucketCounts, (_TOKEN_SECONDS, _TOKEN_SECONDS, _TAIL_SECONDS))
        self._prompt, self._generated = BucketCounts(tokens), BucketCounts(tokens)
        self._most_generated, self._max_tokens = BucketCounts(tokens), BucketCounts(tokens)
        self._answers = BucketCounts(_ANSWERS)
        self._outcomes = dict.fromkeys(ChoiceOutcome, 0)

    @property
    def gaps(self) -> GapCounts:
        """The times between tokens. Another thread may ask for them."""
        return GapCounts(self._itl.bounds, self._itl.counts)

    def began(self, prompts: Iterable[Prompt], answers: int) -> None:
        """Counts a client request, which wants so many ``answers`` to each of its prompts."""
        for prompt in prompts:
            self._prompt.observe(len(prompt.token_ids))
            self._max_tokens.observe(prompt.max_tokens)
        self._answers.observe(answers)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def next_tokens(self, gap_s: float, count: int) -> None:
        """Observes ``count`` tokens that came at once, ``gap_s`` after the one before them."""
        self._itl.observe_equal(gap_s, count)

    def choice_ended(self, outcome: ChoiceOutcome, report: RequestReport | None, tokens: int) -> None:
        """Counts the end of a choice for which this node has generated ``tokens``."""
        self._outcomes[outcome] += 1
        if outcome.is_answer:
            self._generated.observe(tokens)
        if report is not None:
            self._queue.observe(report.queue_s)
            self._prefill.observe(report.prefill_s)
            if report.prefill_source is PrefillSource.REMOTE:
                self._tail.observe(report.transfer_s)

    def request_ended(self, record: RequestRecord, most_tokens: int, now: float) -> None:
        """Counts the end of a client request, whose longest choice has ``most_tokens`` of this node."""
        self._e2e.observe(now - record.arrived)
        if record.first_token is None or record.last_token is None:
            return
        self._decode.observe(now - record.first_token)
        self._most_generated.observe(most_tokens)
        if (tpot_s := record.tpot_s) is not None:
            self._tpot.observe(tpot_s)
        if record.reports:
            prefill_s = max([report.prefill_s for report in record.reports])
            self._inference.observe(prefill_s + record.last_token - record.first_token)

    def collect(self) -> Iterable[Metric]:
        yield self._ttft.family("pdserve_time_to_first_token_seconds", "from arrival to the first token")
        yield self._itl.family(
            "pdserve_inter_token_latency_seconds",
            "gap between two tokens; those that are sent in one chunk share the gap before it evenly",
        )
        yield self._e2e.family("pdserve_e2e_request_latency_seconds", "from arrival to the end")
        yield self._queue.family("pdserve_request_queue_time_seconds", "waiting in the engine")
        yield self._prefill.family("pdserve_request_prefill_time_seconds", "from the queue to the first token")
        yield self._decode.family("pdserve_request_decode_time_seconds", "from the first token to the end")
        yield self._inference.family("pdserve_request_inference_time_seconds", "from the queue to the last token")
        yield self._tpot.family(
            "pdserve_request_time_per_output_token_seconds", "mean of a request's tokens after the first"
        )
        yield self._tail.family(
            "pdserve_kv_transfer_tail_seconds", "from a remote first token to its prompt's last KV block"
        )
        yield self._prompt.family("pdserve_request_prompt_tokens", "tokens of a prompt")
        yield self._generated.family("pdserve_request_generation_tokens", "tokens of an answer")
        yield self._most_generated.family(
            "pdserve_request_max_num_generation_tokens", "tokens of a request's longest answer"
        )
        yield self._answers.family("pdserve_request_params_n", "answers that a request wants to each prompt")
        yield self._max_tokens.family("pdserve_request_params_max_tokens", "tokens that an answer may have")
        success = CounterMetricFamily("pdserve_request_success", "answers", labels=["finished_reason"])
        failure = CounterMetricFamily("pdserve_request_failure", "requests without one", labels=["reason"])
        for outcome, count in self._outcomes.items():
            (success if outcome.is_answer else failure).add_metric([outcome.value], count)
        yield success
        yield failure


class NodeMetrics:
    """The metrics of a node. Observed values come from the API, the rest from the engine's last stats."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        model: str = "",
        scale: MetricsScale = MetricsScale(),  # frozen
        names: MetricsNames = MetricsNames.BOTH,
        others: Iterable[Collector] = (),
    ) -> None:
        """``model`` is the name that clients know it by. ``others`` are collectors of metrics without vLLM's names."""
        self.requests = RequestMetrics(scale)
        shown = VllmNames([self.requests, EngineCollector(stats)], model, names)
        self._registry = CollectorRegistry()
        for collector in (shown, *others):
            self._registry.register(collector)

    async def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return await text_of(self._registry)
