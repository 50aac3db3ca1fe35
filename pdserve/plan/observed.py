"""Reads the rate and the lengths of requests from what running nodes have counted between two looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import PlanError
from pdserve.plan.load import MAX_TOKENS, Lengths

_PROMPTS, _OUTPUTS = "request_prompt_tokens", "request_generation_tokens"
_PREFIXES = ("pdserve_", "vllm:")
LEAST_REQUESTS = 10
"""Fewer requests tell nothing of their lengths."""


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """The requests of a running cluster."""

    rate: float
    requests: int
    prompts: Lengths
    outputs: Lengths


def observed_load(before: Sequence[str], after: Sequence[str], seconds: float) -> ObservedLoad:
    """Returns what came in the ``seconds`` between two looks at the metrics of the same nodes. Raises PlanError."""
    prompts, outputs = (_came_to_all(before, after, name) for name in (_PROMPTS, _OUTPUTS))
    requests = round(sum(prompts.values()))
    if requests < LEAST_REQUESTS:
        raise PlanError(
            f"{requests} requests ended in {seconds:g} s, too few to go by; --look-s says for how long they are counted"
        )
    return ObservedLoad(requests / seconds, requests, _lengths(prompts), _lengths(outputs))


def _came_to_all(before: Sequence[str], after: Sequence[str], name: str) -> dict[float, float]:
    """Returns how many values of a histogram came to all nodes, by the upper bounds of its buckets."""
    came: dict[float, float] = {}
    for earlier, later in zip(before, after, strict=True):
        for bound, count in _came(_buckets(earlier, name), _buckets(later, name)).items():
            came[bound] = came.get(bound, 0.0) + count
    return {bound: came[bound] for bound in sorted(came)}


def _buckets(metrics: str, name: str) -> dict[float, float]:
    """Returns the cumulative counts of a node's histogram by their bounds: a node may tell it under both prefixes."""
    found: dict[str, dict[float, float]] = {f"{prefix}{name}_bucket": {} for prefix in _PREFIXES}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if (counts := found.get(sample.name)) is not None and math.isfinite(sample.value):
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
    except (ValueError, KeyError) as exc:
        raise PlanError(f"a node's /metrics are not in Prometheus' format: {exc}") from exc
    return next((counts for counts in found.values() if counts), {})


def _came(before: dict[float, float], after: dict[float, float]) -> dict[float, float]:
    """Returns how many values came in each bucket of one node. One that has started anew counts from 0."""
    if any(count < before.get(bound, 0.0) for bound, count in after.items()):
        before = {}
    came, upto = {}, 0.0
    for bound in sorted(after):
        count = after[bound] - before.get(bound, 0.0)
        came[bound] = max(0.0, count - upto)
        upto = max(upto, count)
    return came


def _lengths(came: dict[float, float]) -> Lengths:
    ranges, least = [], 1
    for bound, count in came.items():
        most = 2 * least if math.isinf(bound) else max(1, int(bound))
        most = min(most, MAX_TOKENS)
        ranges.append((min(least, most), most, count))
        least = min(most + 1, MAX_TOKENS)
    return Lengths.of(ranges)
