"""The machine that figures come from: its name, cores and memory, and the accelerator that torch sees."""

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
    """That this process may use."""
    memory_gib: float
    chip: str
    """The accelerator; empty if there is none, or if the benchmark does not know."""
    python: str
    torch: str
    pdserve: str
    measured: str
    """Date and time, UTC."""


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
    """Empty where there is none."""
    # Seconds to load, and needed by the benchmarks of an engine alone.
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
