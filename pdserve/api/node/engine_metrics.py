"""Shows what the engine of a node has counted, which it sends as totals, without counting it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from typing import Any, get_args, get_type_hints

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve.wire.engine import (
    STEP_TOKEN_BOUNDS,
    EngineStats,
    PrefillNodeStats,
    PrefillReason,
    PrefillSource,
    PrefillStats,
    StepStats,
)
from pdserve.wire.engine_counts import MetricKind, ShownAs

_DECIDED = (PrefillSource.LOCAL, PrefillSource.REMOTE)
"""The sources that a decision may name: a fallback is none's decision."""


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
    used = 1 - cache.free_blocks / cache.total_blocks if cache.total_blocks else 0.0
    yield _gauge("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1", used)
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
    yield _counter(
        "prompt_tokens_computed",
        "tokens of prompts that were computed here, for this node or others",
        stats.step.computed_prompt_tokens,
    )
    fallbacks = stats.prefills.get(PrefillSource.FALLBACK.value, 0)
    yield _counter("fallbacks", "prompts computed here because a prefill node failed", fallbacks)


def _prefill(stats: PrefillStats) -> Iterable[Metric]:
    """Yields what the choice between local and remote prefill goes by."""
    decisions = CounterMetricFamily(
        "pdserve_placement", "prompts, by where they went and why", labels=["source", "reason"]
    )
    made = {(source, reason): 0 for source in _DECIDED for reason in PrefillReason}
    made |= {(decision.source, decision.reason): decision.count for decision in stats.decisions}
    for (source, reason), count in made.items():
        decisions.add_metric([source.value, reason.value], count)
    yield decisions
    yield _gauge("prefill_local_tokens_per_second", "rate of prompts on this node", stats.tokens_per_s)
    yield _gauge("prefill_decode_step_seconds", "a step without prompts", stats.decode_step_s)
    yield _gauge("placement_last_local_seconds", "to the first token, of the prompt last compared", stats.last_local_s)
    yield _gauge("placement_last_remote_seconds", "the same, by a prefill node", stats.last_remote_s)
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
    """Yields what steps take, and how those with prompts beside streams kept their target."""
    steps = HistogramMetricFamily("pdserve_iteration_tokens", "tokens of a step, of prompts and answers")
    bounds = [*map(floatToGoString, STEP_TOKEN_BOUNDS), "+Inf"]
    steps.add_metric([], list(zip(bounds, accumulate(stats.num_tokens), strict=True)), stats.tokens)
    yield steps
    yield _gauge("itl_target_seconds", "of the steps that decode, 0 without a target", stats.itl_target_s)
    yield _counter("shared_steps", "with chunks of prompts beside requests that decode", stats.shared)
    yield _counter("shared_steps_prompt_tokens", "in the chunks of those steps", stats.shared_prompt_tokens)
    yield _counter("shared_steps_late", "of those, the ones that took longer than the target", stats.shared_late)
    parts = GaugeMetricFamily("pdserve_step_part_seconds", "estimated, of each part of a step", labels=["part"])
    for name, seconds in stats.parts.items():
        parts.add_metric([name], seconds)
    yield parts


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pdserve_{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"pdserve_{name}", help, value=value)
