"""The proxy's metrics: a Prometheus registry of its own, and the sum of several processes' as Prometheus text.

What is counted of each request is in ``relay.access_log``.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.registry import Collector

from pdserve.wire.discovery import Role
from pdserve.wire.proxy_workers import Family, Sample
from pdserve_proxy.registry.snapshot import Snapshot
from pdserve_proxy.relay.access_log import RequestCounts

_LASTING = ("counter", "histogram")
"""What a process that ended has counted stays true; what it held does not."""


def export_families(registry: CollectorRegistry) -> tuple[Family, ...]:
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


def sum_families(parts: Iterable[tuple[Family, ...]]) -> tuple[Family, ...]:
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


def lasting_families(families: tuple[Family, ...]) -> tuple[Family, ...]:
    """What of a process's metrics outlives it."""
    return tuple(family for family in families if family.kind in _LASTING)


def render_families(families: tuple[Family, ...]) -> bytes:
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


CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class ProxyMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.counts = RequestCounts()
        registry.register(self.counts)
        self.queued = Gauge("pdserve_proxy_requests_queued", "Requests that wait for their turn.", registry=registry)
        self._dropped_frames = Counter(
            "pdserve_proxy_discovery_frames_dropped",
            "Discovery frames that were not acceptable.",
            ["reason"],
            registry=registry,
        )
        self._nodes = Gauge("pdserve_proxy_nodes", "Registered nodes.", ["role"], registry=registry)

    def count_dropped_frame(self, reason: str) -> None:
        self._dropped_frames.labels(reason).inc()

    def export_families(self, snapshot: Snapshot) -> tuple[Family, ...]:
        """All of it, with the nodes of ``snapshot`` counted."""
        roles = Tally(node.info.role for node in snapshot.nodes)
        for role in Role:
            self._nodes.labels(role.value).set(roles[role])
        return export_families(self.registry)
