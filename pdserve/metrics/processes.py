"""Shows what processes take of the machine, and which software they are."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.installed_version import INSTALLED_VERSION


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
