"""Counts what each node did with the requests of this process.

Nodes come and go, and their number has a bound that is too high for labels. So the first ``MAX_LABELLED`` nodes have a
label each, and all others share one. A name that no node has any more disappears after a while. A node that is started
again under its old name goes on with its counts.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pdserve.metrics import BucketCounts, seconds_to
from pdserve.wire.discovery import NodeInfo

MAX_LABELLED = 64
FORGOTTEN_AFTER_S = 900.0
"""Seconds for which the counts of a name are remembered that no node has."""
OTHER_NODES = "other"
"""The label of nodes without one of their own."""


class NodeFailure(enum.Enum):
    """The ways in which an attempt at a node fails, as figures show them."""

    UNREACHABLE = "unreachable"
    """No connection could be made."""
    REFUSED = "refused"
    """The node has not begun with the request, or has returned it in good order."""
    LOST = "lost"
    """The node may have begun with it."""


class _Counts:
    """The counts of one label."""

    __slots__ = ("failures", "first_bytes", "requests", "resumed", "seen_s")

    def __init__(self, bounds_s: tuple[float, ...], seen_s: float) -> None:
        self.requests = 0
        self.resumed = 0
        self.failures = dict.fromkeys(NodeFailure, 0)
        self.first_bytes = BucketCounts(bounds_s)
        self.seen_s = seen_s


class NodeCounts:
    """The counts of the nodes. One thread counts and collects."""

    def __init__(self, timeout_s: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        # Every other bound: each node has a histogram.
        self._bounds_s = seconds_to(timeout_s)[::-2][::-1]
        self._clock = clock
        self._labelled: dict[str, _Counts] = {}
        self._others: _Counts | None = None

    def began(self, node: NodeInfo) -> None:
        """Counts an attempt at ``node``."""
        (self._labelled.get(node.name) or self._of(node.name)).requests += 1

    def answered(self, node: NodeInfo, first_byte_s: float) -> None:
        """Counts the first byte of a body, so many seconds after the attempt began."""
        (self._labelled.get(node.name) or self._of(node.name)).first_bytes.observe(first_byte_s)

    def failed(self, node: NodeInfo, kind: NodeFailure) -> None:
        self._of(node.name).failures[kind] += 1

    def resumed(self, node: NodeInfo) -> None:
        """Counts an answer whose node was lost, and that went on at ``node``."""
        self._of(node.name).resumed += 1

    def collect(self, under_way: dict[str, int]) -> Iterator[Metric]:
        """Yields the metrics. ``under_way`` has the requests at each registered node, by its name."""
        now_s = self._clock()
        for name in under_way.keys() & self._labelled.keys():
            self._labelled[name].seen_s = now_s
        self._forget(now_s)
        in_flight: Counter[str] = Counter()
        for name, count in under_way.items():
            self._of(name)
            in_flight[name if name in self._labelled else OTHER_NODES] += count
        counts = dict(self._labelled)
        if self._others is not None:
            counts[OTHER_NODES] = self._others
        requests = CounterMetricFamily("pdserve_proxy_node_requests", "Attempts at a node.", labels=["node"])
        failures = CounterMetricFamily(
            "pdserve_proxy_node_failures", "Attempts and answers that failed at a node.", labels=["node", "kind"]
        )
        resumed = CounterMetricFamily(
            "pdserve_proxy_node_resumed", "Answers that went on at a node after a loss.", labels=["node"]
        )
        under = GaugeMetricFamily(
            "pdserve_proxy_node_requests_in_flight", "Requests and prompts that a node has now.", labels=["node"]
        )
        first_bytes = HistogramMetricFamily(
            "pdserve_proxy_node_time_to_first_byte_seconds",
            "From the beginning of an attempt to the first body byte from the node.",
            labels=["node"],
        )
        for label, of_node in counts.items():
            requests.add_metric([label], of_node.requests)
            resumed.add_metric([label], of_node.resumed)
            under.add_metric([label], in_flight[label])
            of_node.first_bytes.add_to(first_bytes, label)
            for kind, count in of_node.failures.items():
                failures.add_metric([label, kind.value], count)
        yield from (requests, failures, resumed, under, first_bytes)

    def _of(self, name: str) -> _Counts:
        counts = self._labelled.get(name)
        return self._new(name) if counts is None else counts

    def _new(self, name: str) -> _Counts:
        now_s = self._clock()
        if len(self._labelled) >= MAX_LABELLED:
            self._forget(now_s)
        if len(self._labelled) < MAX_LABELLED and name != OTHER_NODES:
            counts = self._labelled[name] = _Counts(self._bounds_s, now_s)
            return counts
        if self._others is None:
            self._others = _Counts(self._bounds_s, now_s)
        return self._others

    def _forget(self, now_s: float) -> None:
        """Forgets the names that no node has had for a while."""
        for name in [name for name, counts in self._labelled.items() if now_s - counts.seen_s > FORGOTTEN_AFTER_S]:
            del self._labelled[name]
