"""Reads the rate and the lengths of requests from what running nodes have counted between two looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    """Returns what came in the ``seconds`` between two looks at the metrics of all nodes. Raises PlanError."""
    prompts, outputs = (_came(_buckets(before, name), _buckets(after, name)) for name in (_PROMPTS, _OUTPUTS))
    requests = round(sum(prompts.values()))
    if requests < LEAST_REQUESTS:
        raise PlanError(
            f"{requests} requests ended in {seconds:g} s, too few to go by; --look-s says for how long they are counted"
        )
    return ObservedLoad(requests / seconds, requests, _lengths(prompts), _lengths(outputs))


def _buckets(metrics: Iterable[str], name: str) -> dict[float, float]:
    """Returns the cumulative counts of a histogram by their bounds, over all nodes."""
    found: dict[float, float] = {}
    names = {f"{prefix}{name}_bucket" for prefix in _PREFIXES}
    for text in metrics:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in names:
                    bound = float(sample.labels["le"])
                    found[bound] = found.get(bound, 0.0) + sample.value
    return found


def _came(before: dict[float, float], after: dict[float, float]) -> dict[float, float]:
    """Returns how many values came in each bucket, by its upper bound. A node that has started anew counts from 0."""
    came, upto = {}, 0.0
    for bound in sorted(after):
        count = max(0.0, after[bound] - before.get(bound, 0.0))
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
