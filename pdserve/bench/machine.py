"""Describes the machine that figures come from: its name, cores and memory, and the accelerator that torch sees."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

_CPU_INFO = Path("/proc/cpuinfo")


class Machine(msgspec.Struct, frozen=True):
    """What a reader needs to compare two runs."""

    cpu: str
    cores: int
    """The number of cores that this process may use."""
    memory_gib: float
    chip: str
    """The accelerator; empty if there is none, or if the benchmark does not ask for it."""
    python: str
    torch: str
    pdserve: str
    measured: str
    """The date and time of the measurement, in UTC."""


def this_machine(chip: str = "") -> Machine:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages / 2**30, 1),
        chip=chip,
        python=platform.python_version(),
        torch=version("torch"),
        pdserve=version("pdserve"),
        measured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    )


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def chip_name() -> str:
    """Returns the name of the accelerator; empty if there is none."""
    # torch takes seconds to load, and only the benchmarks of an engine need it.
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
