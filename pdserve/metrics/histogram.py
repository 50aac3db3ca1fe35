"""Counts observations in buckets, and says which buckets fit a limit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LONG_SECONDS = (300.0, 600.0, 1200.0, 3600.0, 7200.0, 14_400.0, 43_200.0, 86_400.0)


class BucketCounts:
    """The counts of a histogram. They have no lock: one thread observes and collects.

    prometheus_client's own histogram takes a lock and several calls for each observation.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._names = [*map(floatToGoString, bounds), "+Inf"]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def observe_equal(self, total: float, count: int) -> None:
        """Observes ``count`` equal values whose sum is ``total``."""
        self._counts[bisect_left(self.bounds, total / count)] += count
        self._sum += total

    @property
    def counts(self) -> tuple[int, ...]:
        """How many values each bucket has alone; the last one has those above all bounds."""
        return tuple(self._counts)

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus's cumulative buckets: each counts what the buckets below it count too."""
        return list(zip(self._names, map(float, accumulate(self._counts)), strict=True))

    def family(self, name: str, help: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(name, help, buckets=self.buckets, sum_value=self._sum)

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        """Adds the counts to a family whose metrics differ in their labels."""
        family.add_metric(labels, self.buckets, self._sum)


def seconds_to(limit_s: float) -> tuple[float, ...]:
    """Returns the bounds of a histogram of times that are at most ``limit_s``, and that last long at times.

    They are the same for almost equal limits, so that the histograms of several nodes can be added up.
    """
    bounds = list(_SECONDS)
    for bound in _LONG_SECONDS:
        if bounds[-1] >= limit_s:
            break
        bounds.append(bound)
    return tuple(bounds)


def tokens_to(limit: int) -> tuple[float, ...]:
    """Returns the bounds of a histogram of tokens: 1, 2, 5, 10 and so on, to the first that is not below ``limit``."""
    bounds = [1.0]
    while bounds[-1] < limit:
        bounds.append(bounds[-1] * (2.5 if len(bounds) % 3 == 2 else 2))
    return tuple(bounds)
