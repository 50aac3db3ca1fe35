"""Holds a proxy process's metrics, and adds up those of several processes as Prometheus text.

``relay.access_log`` counts the requests themselves.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.registry import Collector

from pdserve.control.frame import ClockSkew
from pdserve.metrics import BuildInfo, own_process, text_of
from pdserve.tracing.tracing import SpanCounts
from pdserve.wire.discovery import Role
from pdserve.wire.proxy_workers import Family, Sample
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.registry.discovery_server import DropCause
from pdserve_proxy.registry.snapshot import Snapshot, unpaired_roles
from pdserve_proxy.responses.store import ResponseStore

_LASTING = ("counter", "histogram")
"""The kinds of metrics that outlive their process: its counts stay true, and its gauges do not."""


def export_families(registry: Collector) -> tuple[Family, ...]:
    """Returns all metrics of ``registry``, without the times at which its counters were made."""
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


async def render_families(families: tuple[Family, ...]) -> bytes:
    """Returns ``families`` as Prometheus text."""
    return await text_of(_FamiliesCollector(families))


def nodes_of(families: Iterable[Family]) -> frozenset[str]:
    """Returns the nodes that are labels in ``families``."""
    return frozenset(sample.labels["node"] for family in families for sample in family.samples if _is_of_node(sample))


def of_nodes(families: tuple[Family, ...], names: frozenset[str]) -> tuple[Family, ...]:
    """Returns ``families`` without the samples of nodes other than ``names``."""

    def kept(family: Family) -> tuple[Sample, ...]:
        return tuple(sample for sample in family.samples if not _is_of_node(sample) or sample.labels["node"] in names)

    return tuple(msgspec.structs.replace(family, samples=kept(family)) for family in families)


def _is_of_node(sample: Sample) -> bool:
    return "node" in sample.labels


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


CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class PressureFigures(Protocol):
    """The shares of their targets that prompts and answers use."""

    @property
    def prompts(self) -> float: ...

    @property
    def answers(self) -> float: ...


class ProxyMetrics:
    """The metrics of one proxy process, in a Prometheus registry of their own."""

    def __init__(self, process: str = "proxy", timeout_s: float = 600.0) -> None:
        """``process`` is the process's label in its own metrics. No request takes longer than ``timeout_s``."""
        registry = self.registry = CollectorRegistry()
        self.counts = RequestCounts(timeout_s)
        registry.register(self.counts)
        registry.register(own_process(process))
        self._build = BuildInfo()
        self.spans = SpanCounts("pdserve_proxy")
        registry.register(self.spans)
        self.queued = Gauge("pdserve_proxy_requests_queued", "Requests that wait for their turn.", registry=registry)
        self._stored = Gauge("pdserve_proxy_stored_responses", "Responses that are stored.", registry=registry)
        self._store_bytes = Gauge(
            "pdserve_proxy_store_bytes", "The memory that stored responses take.", registry=registry
        )
        self._dropped_frames = Counter(
            "pdserve_proxy_discovery_frames_dropped",
            "Discovery frames that were not acceptable.",
            ["reason"],
            registry=registry,
        )
        for cause in DropCause:
            self._dropped_frames.labels(cause.value)
        self.clocks = ClockSkew()
        """How far nodes' clocks are from this one's."""
        Gauge(
            "pdserve_proxy_clock_skew_seconds",
            "How far the clock of the node whose clock differs most is behind.",
            registry=registry,
        ).set_function(self.clocks.worst_s)
        self._nodes = Gauge("pdserve_proxy_nodes", "Registered nodes.", ["role"], registry=registry)
        self._unpaired = Gauge(
            "pdserve_proxy_unpaired_nodes",
            "Registered nodes that no node of the other role fits.",
            ["role"],
            registry=registry,
        )
        self._live_proxies = Gauge(
            "pdserve_proxy_live_proxies", "Proxies of the cluster that nodes are registered at.", registry=registry
        )
        self._switches = Counter(
            "pdserve_proxy_role_switches",
            "Switches of nodes' roles that were decided, by the new role.",
            ["role", "outcome"],
            registry=registry,
        )
        for role in Role:
            for outcome in ("done", "failed"):
                self._switches.labels(role.value, outcome)
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

    def count_dropped_frame(self, cause: DropCause) -> None:
        self._dropped_frames.labels(cause.value).inc()

    def count_role_switch(self, role: Role, *, done: bool) -> None:
        self._switches.labels(role.value, "done" if done else "failed").inc()

    def show_pressures(self, pressures: Mapping[tuple[str, str], PressureFigures]) -> None:
        """Shows the pressures of each model and fingerprint, and forgets those of others."""
        self._pressure.clear()
        for (model, fingerprint), pressure in pressures.items():
            self._pressure.labels(model, fingerprint, "prompts").set(pressure.prompts)
            self._pressure.labels(model, fingerprint, "answers").set(pressure.answers)

    def export_families(self, snapshot: Snapshot) -> tuple[Family, ...]:
        """Returns all metrics of this process and those of the proxy, with the nodes of ``snapshot`` counted."""
        roles = Tally(node.info.role for node in snapshot.nodes)
        for role in Role:
            self._nodes.labels(role.value).set(roles[role])
        unpaired = unpaired_roles(snapshot)
        for role in (Role.DECODE, Role.PREFILL):
            self._unpaired.labels(role.value).set(unpaired[role])
        self._live_proxies.set(snapshot.live_proxies)
        return (*export_families(self.registry), *export_families(self._build))
