"""Holds a proxy process's metrics, and adds up those of several processes as Prometheus text.

``relay.access_log`` counts the requests themselves.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.registry import Collector

from pdserve.wire.discovery import Role
from pdserve.wire.proxy_workers import Family, Sample
from pdserve_proxy.registry.snapshot import Snapshot
from pdserve_proxy.relay.access_log import RequestCounts
from pdserve_proxy.responses.store import ResponseStore

_LASTING = ("counter", "histogram")
"""The kinds of metrics that outlive their process: its counts stay true, and its gauges do not."""


def export_families(registry: CollectorRegistry) -> tuple[Family, ...]:
    """Returns all metrics in ``registry``, without the times at which its counters were made."""
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
    """Returns the sums of the same metrics of several processes, sample by sample."""
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
    """Returns those of a process's metrics that outlive it."""
    return tuple(family for family in families if family.kind in _LASTING)


def render_families(families: tuple[Family, ...]) -> bytes:
    """Returns ``families`` as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(_FamiliesCollector(families))
    return prometheus_client.generate_latest(registry)


class _FamiliesCollector(Collector):
    """A collector of metrics that have been collected before, perhaps in another process."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


FRAME_DROPS = ("authentication", "malformed")
"""Why the discovery server drops frames."""
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class PressureFigures(Protocol):
    """The shares of their targets that prompts and answers use."""

    @property
    def prompts(self) -> float: ...

    @property
    def answers(self) -> float: ...


class ProxyMetrics:
    """The metrics of one proxy process, in a Prometheus registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.counts = RequestCounts()
        registry.register(self.counts)
        self.queued = Gauge("pdserve_proxy_requests_queued", "Requests that wait for their turn.", registry=registry)
        self._stored = Gauge("pdserve_proxy_stored_responses", "Responses that are kept.", registry=registry)
        self._store_bytes = Gauge(
            "pdserve_proxy_store_bytes", "The memory that kept responses take.", registry=registry
        )
        self._dropped_frames = Counter(
            "pdserve_proxy_discovery_frames_dropped",
            "Discovery frames that were not acceptable.",
            ["reason"],
            registry=registry,
        )
        for reason in FRAME_DROPS:  # an alert on a rate sees the first one only where there was a 0 before
            self._dropped_frames.labels(reason)
        self._nodes = Gauge("pdserve_proxy_nodes", "Registered nodes.", ["role"], registry=registry)
        self._live_proxies = Gauge(
            "pdserve_proxy_live_proxies", "Proxies of the cluster that nodes are registered at.", registry=registry
        )
        self._switches = Counter(
            "pdserve_proxy_role_switches",
            "Switches of nodes' roles that were decided, by the new role.",
            ["role", "outcome"],
            registry=registry,
        )
        self._pressure = Gauge(
            "pdserve_proxy_role_pressure",
            "The share of its target that each side of a model uses.",
            ["model", "fingerprint", "side"],
            registry=registry,
        )

    def watch_store(self, store: ResponseStore) -> None:
        """Shows what ``store`` has."""
        self._stored.set_function(lambda: len(store))
        self._store_bytes.set_function(lambda: store.taken_bytes)

    def count_dropped_frame(self, reason: str) -> None:
        self._dropped_frames.labels(reason).inc()

    def count_role_switch(self, role: Role, *, done: bool) -> None:
        self._switches.labels(role.value, "done" if done else "failed").inc()

    def show_pressures(self, pressures: Mapping[tuple[str, str], PressureFigures]) -> None:
        """Shows the pressures of each model and fingerprint, and forgets those of others."""
        self._pressure.clear()
        for (model, fingerprint), pressure in pressures.items():
            self._pressure.labels(model, fingerprint, "prompts").set(pressure.prompts)
            self._pressure.labels(model, fingerprint, "answers").set(pressure.answers)

    def export_families(self, snapshot: Snapshot) -> tuple[Family, ...]:
        """Returns all metrics of this process, with the nodes of ``snapshot`` counted."""
        roles = Tally(node.info.role for node in snapshot.nodes)
        for role in Role:
            self._nodes.labels(role.value).set(roles[role])
        self._live_proxies.set(snapshot.live_proxies)
        return export_families(self.registry)
