"""Metrics of several processes as one: taken out of a registry, added up, and written as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from pdserve.wire.proxy_workers import Family, Sample

_LASTING = ("counter", "histogram")
"""What a process that ended has counted stays true; what it held does not."""


def export(registry: CollectorRegistry) -> tuple[Family, ...]:
    """All that ``registry`` holds, but for the times at which counters were made."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple(
                Sample(sample.name, sample.labels, sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ),
        )
        for metric in registry.collect()
    )


def total(parts: Iterable[tuple[Family, ...]]) -> tuple[Family, ...]:
    """The same metrics of several processes, added up sample by sample."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            families.setdefault(family.name, family)
            of_family = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                of_family[key] = of_family.get(key, 0.0) + sample.value
    return tuple(
        Family(
            name,
            family.documentation,
            family.kind,
            tuple(Sample(sample, dict(labels), value) for (sample, labels), value in sums[name].items()),
        )
        for name, family in families.items()
    )


def lasting(families: tuple[Family, ...]) -> tuple[Family, ...]:
    """What of a process's metrics outlives it."""
    return tuple(family for family in families if family.kind in _LASTING)


def render(families: tuple[Family, ...]) -> bytes:
    """Prometheus text."""
    return prometheus_client.generate_latest(_Families(families))


class _Families(CollectorRegistry):
    """What ``generate_latest`` takes."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        super().__init__()
        self.register(_Collected(families))


class _Collected(Collector):
    def __init__(self, families: tuple[Family, ...]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric
