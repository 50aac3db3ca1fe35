"""Checks the GPUs that torch finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.doctor.finding import Finding, not_applicable, ok, warning

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    names: tuple[str, ...]
    cuda_build: str
    """The CUDA version that torch was built for; empty for a CPU build."""
    driver: bool
    """Whether NVIDIA's driver is loaded."""


def read_gpus() -> GpuFacts:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = tuple(torch.cuda.get_device_name(index) for index in range(count))
    return GpuFacts(names, torch.version.cuda or "", _DRIVER.exists())


def check_gpus(facts: GpuFacts) -> Finding:
    if facts.names:
        return ok("GPU", f"{', '.join(facts.names)}, torch for CUDA {facts.cuda_build}")
    if not facts.driver:
        return not_applicable("GPU", "none: engines compute on the CPU")
    if not facts.cuda_build:
        return warning("GPU", "there is a driver, but this torch is built for CPUs", "install torch built for CUDA")
    return warning("GPU", f"there is a driver, but torch for CUDA {facts.cuda_build} finds none", "see nvidia-smi")
