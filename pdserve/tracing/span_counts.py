"""Counts what became of the requests whose spans a process exports."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class SpanCounts(Collector):
    """The counts of one process; each has one writer but at the end."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.exported = 0
        self.dropped = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{self._prefix}_traced_requests",
            "Requests whose spans were to be exported, by what became of them.",
            labels=["outcome"],
        )
        family.add_metric(["exported"], self.exported)
        family.add_metric(["dropped"], self.dropped)
        yield family
