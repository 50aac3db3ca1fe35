"""Tests what a process shows of itself and of others."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from prometheus_client.core import Metric

from pdserve.metrics import BuildInfo, ProcessMetrics, installed

NAMES = {
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds",
    "process_open_fds",
    "process_max_fds",
    "process_threads",
}


def values(metrics: list[Metric], process: str) -> dict[str, float]:
    return {
        metric.name: sample.value
        for metric in metrics
        for sample in metric.samples
        if sample.labels == {"process": process}
    }


def test_each_process_has_all_metrics_until_it_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        shown = ProcessMetrics(lambda: {"api": os.getpid(), "engine": child.pid})
        both = list(shown.collect())
        assert {metric.name for metric in both} == NAMES
        own, other = values(both, "api"), values(both, "engine")
        assert own.keys() == other.keys() == NAMES
        assert own["process_resident_memory_bytes"] > 10 * 2**20
        assert 0 < own["process_open_fds"] <= own["process_max_fds"]
        assert other["process_threads"] == 1
        # The kernel counts ticks since the machine's start, whose own second is rounded.
        assert abs(time.time() - other["process_start_time_seconds"]) < 60
        child.kill()
        child.wait()
        rest = list(shown.collect())
        assert values(rest, "api").keys() == NAMES
        assert values(rest, "engine") == {}


def test_the_software_is_in_the_labels() -> None:
    (info,) = BuildInfo(torch=installed("torch"), kernels="avx2").collect()
    (sample,) = info.samples
    assert sample.value == 1
    assert sample.labels["python"] == sys.version.split()[0]
    assert sample.labels["torch"].startswith("2.")
    assert sample.labels["kernels"] == "avx2"
    assert installed("no-such-package") == ""
