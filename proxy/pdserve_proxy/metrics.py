"""What the proxy counts, in a Prometheus registry of its own."""

from __future__ import annotations

from collections import Counter as Tally

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve.wire.discovery import Role
from pdserve.wire.proxy_workers import Family
from pdserve_proxy.scraping import export
from pdserve_proxy.snapshot import Snapshot

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ProxyMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "pdserve_proxy_requests", "Client requests that ended.", ["route", "status"], registry=registry
        )
        self.outcomes = Counter(
            "pdserve_proxy_outcomes", "How generation requests ended.", ["outcome"], registry=registry
        )
        self.in_flight = Gauge(
            "pdserve_proxy_requests_in_flight", "Generation requests that have not ended.", registry=registry
        )
        self.queued = Gauge("pdserve_proxy_requests_queued", "Requests that wait for their turn.", registry=registry)
        self.retries = Counter(
            "pdserve_proxy_upstream_retries", "Attempts that went to a second decode node.", registry=registry
        )
        self.relayed_bytes = Counter(
            "pdserve_proxy_relayed_bytes", "Body bytes that were relayed to clients.", registry=registry
        )
        self.first_byte_seconds = Histogram(
            "pdserve_proxy_time_to_first_byte_seconds",
            "From a request's arrival to the first body byte from its node.",
            buckets=_FIRST_BYTE_BUCKETS,
            registry=registry,
        )
        self.dropped_frames = Counter(
            "pdserve_proxy_discovery_frames_dropped",
            "Discovery frames that were not acceptable.",
            ["reason"],
            registry=registry,
        )
        self._nodes = Gauge("pdserve_proxy_nodes", "Registered nodes.", ["role"], registry=registry)

    def export(self, snapshot: Snapshot) -> tuple[Family, ...]:
        """All of it, with the nodes of ``snapshot`` counted."""
        roles = Tally(node.info.role for node in snapshot.nodes)
        for role in Role:
            self._nodes.labels(role.value).set(roles[role])
        return export(self.registry)
