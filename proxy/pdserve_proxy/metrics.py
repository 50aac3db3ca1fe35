"""What the proxy counts, in a Prometheus registry of its own."""

from __future__ import annotations

from collections import Counter as Tally

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge

from pdserve.wire.discovery import Role
from pdserve.wire.proxy_workers import Family
from pdserve_proxy.exchange import Outcome
from pdserve_proxy.request_counts import RequestCounts
from pdserve_proxy.scraping import export
from pdserve_proxy.snapshot import Snapshot

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class ProxyMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.counts = RequestCounts(outcome.value for outcome in Outcome)
        registry.register(self.counts)
        self.queued = Gauge("pdserve_proxy_requests_queued", "Requests that wait for their turn.", registry=registry)
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
