"""What the metrics of nodes and proxies have in common.

``BucketCounts`` is a histogram, ``ProcessMetrics`` shows what processes take of the machine and ``BuildInfo`` which
software they are, and ``text_of`` writes all as Prometheus's text, a little at a time.
"""

from __future__ import annotations

import asyncio
import os
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve.wire.version import INSTALLED_VERSION

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_LONG_SECONDS = (300.0, 600.0, 1200.0, 3600.0, 7200.0, 14_400.0, 43_200.0, 86_400.0)


async def text_of(collector: Collector) -> bytes:
    """Returns the text of what ``collector`` shows.

    After each metric other tasks have a turn: all of it may take milliseconds, for which no token should wait.
    """
    texts = []
    for metric in collector.collect():
        texts.append(generate_latest(_Collected(metric)))
        await asyncio.sleep(0)
    return b"".join(texts)


class _Collected(Collector):
    """One metric that has been collected before."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


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


class ProcessMetrics(Collector):
    """The usual ``process_*`` metrics, of several processes with a ``process`` label each.

    A process that is gone has none.
    """

    def __init__(self, processes: Callable[[], Mapping[str, int]]) -> None:
        """``processes`` returns the process ids by their label. The labels have to be few."""
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for label, pid in self._processes().items():
            for metric in (*_usual(pid), *_threads(pid)):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.add_sample(sample.name, {"process": label}, sample.value)
        return families.values()


def own_process(label: str) -> ProcessMetrics:
    """Returns the metrics of this process."""
    pid = os.getpid()
    return ProcessMetrics(lambda: {label: pid})


def _usual(pid: int) -> Iterable[Metric]:
    return ProcessCollector(pid=lambda: pid, registry=None).collect()


def _threads(pid: int) -> Iterable[Metric]:
    try:
        count = sum(1 for _ in Path("/proc", str(pid), "task").iterdir())
    except OSError:
        return
    yield GaugeMetricFamily("process_threads", "Number of threads.", value=count)


class BuildInfo(Collector):
    """``pdserve_build_info``: 1, with the versions of the software as labels."""

    def __init__(self, **labels: str) -> None:
        """``labels`` come beside the versions of pdserve and of Python."""
        self._labels = {"version": INSTALLED_VERSION, "python": platform.python_version(), **labels}

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "pdserve_build_info", "The software that runs, in the labels.", labels=list(self._labels)
        )
        family.add_metric(list(self._labels.values()), 1)
        yield family


def installed(package: str) -> str:
    """Returns the version of a package, without importing it; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
