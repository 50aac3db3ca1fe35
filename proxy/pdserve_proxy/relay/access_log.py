"""What remains of a request when it has ended: what ``/metrics`` counts of it, and one line in the access log.

Requests are counted in plain numbers, and made Prometheus's when somebody asks. Each of Prometheus's own counters takes
a lock and four calls to add to, and every request adds to six.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pdserve_proxy.relay.relayed_request import RelayedRequest

FIRST_BYTE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
OTHER_ROUTES = "other"


class RequestCounts(Collector):
    """Of one process. Counted and collected on one thread."""

    def __init__(self, outcomes: Iterable[str]) -> None:
        self.in_flight = 0
        self.retries = 0
        self.relayed_bytes = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        """That ended, by route and status."""
        self.outcomes = dict.fromkeys(outcomes, 0)
        self._first_bytes = [0] * (len(FIRST_BYTE_BOUNDS_S) + 1)
        self._first_bytes_s = 0.0

    def first_byte(self, after_s: float) -> None:
        self._first_bytes[bisect_left(FIRST_BYTE_BOUNDS_S, after_s)] += 1
        self._first_bytes_s += after_s

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "pdserve_proxy_requests", "Client requests that ended.", labels=["route", "status"]
        )
        for (route, status), count in self.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        outcomes = CounterMetricFamily("pdserve_proxy_outcomes", "How generation requests ended.", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        yield GaugeMetricFamily(
            "pdserve_proxy_requests_in_flight", "Generation requests that have not ended.", self.in_flight
        )
        yield CounterMetricFamily(
            "pdserve_proxy_upstream_retries", "Attempts that went to another decode node than the first.", self.retries
        )
        yield CounterMetricFamily(
            "pdserve_proxy_relayed_bytes", "Body bytes that were relayed to clients.", self.relayed_bytes
        )
        yield HistogramMetricFamily(
            "pdserve_proxy_time_to_first_byte_seconds",
            "From a request's arrival to the first body byte from its node.",
            buckets=list(self._buckets()),
            sum_value=self._first_bytes_s,
        )

    def _buckets(self) -> Iterator[tuple[str, float]]:
        """Prometheus's, each with all that is in those below it."""
        within = 0
        for bound, count in zip((*FIRST_BYTE_BOUNDS_S, float("inf")), self._first_bytes, strict=True):
            within += count
            yield "+Inf" if bound == float("inf") else str(bound), within


log = logging.getLogger("pdserve_proxy.requests")


class AccessLog:
    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts

    def began(self) -> None:
        self._counts.in_flight += 1

    def retried(self) -> None:
        self._counts.retries += 1

    def ended(self, relayed: RelayedRequest) -> None:
        assert relayed.outcome is not None
        counts = self._counts
        counts.in_flight -= 1
        counts.requests[relayed.path, relayed.status] += 1
        counts.relayed_bytes += relayed.relayed_bytes
        counts.outcomes[relayed.outcome] += 1
        if relayed.first_byte_s is not None:
            counts.first_byte(relayed.first_byte_s)
        if log.isEnabledFor(logging.INFO):  # the line's fields cost more than all the counting
            _write_line(relayed)


def _write_line(relayed: RelayedRequest) -> None:
    assert relayed.outcome is not None
    log.info(
        "request_id=%s route=%s decode=%s prefill=%s status=%d first_byte_s=%s total_s=%.3f bytes=%d outcome=%s",
        relayed.request_id,
        relayed.path,
        relayed.decode_name,
        relayed.prefill_name,
        relayed.status,
        "-" if relayed.first_byte_s is None else f"{relayed.first_byte_s:.3f}",
        relayed.total_s,
        relayed.relayed_bytes,
        relayed.outcome.value,
    )
