"""Tests that the CPU time and memory of processes are those that the kernel counts."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import pytest

from benchmarks.process_usage import child_of, cpu_s, peak_mib, reset_peaks
from pdserve.errors import BenchError


def test_work_costs_cpu_time_and_waiting_does_not() -> None:
    pids = {"me": os.getpid()}
    before = cpu_s(pids)["me"]
    begin = time.process_time()
    while time.process_time() - begin < 0.2:
        pass
    assert cpu_s(pids)["me"] - before == pytest.approx(time.process_time() - begin, abs=0.05)


def test_the_peak_is_that_since_the_reset() -> None:
    pids = {"me": os.getpid()}
    use(64)
    high = peak_mib(pids)["me"]
    reset_peaks(pids)
    low = peak_mib(pids)["me"]
    use(96)
    assert peak_mib(pids)["me"] >= low + 90
    assert low <= high


def use(mib: int) -> None:
    """Writes to memory that the process has not had before, where a new object may have some that it has kept."""
    with mmap.mmap(-1, mib * 2**20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child_of(os.getpid()) > 0
        with pytest.raises(BenchError, match="has no children"):
            child_of(child.pid)
        child.communicate(b"\n")
    for look in (cpu_s, peak_mib, reset_peaks):
        with pytest.raises(BenchError, match=r"gone|No such"):
            look({"node": child.pid})
    with pytest.raises(BenchError, match="is gone"):
        child_of(child.pid)
