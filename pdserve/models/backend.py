"""What an engine computes on, and the kernels that it has there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.config import Device
from pdserve.errors import ConfigError
from pdserve_kernels.contract import GraphKernels, Kernels

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and the kernels for it; ``graph_kernels`` are the same where decode steps can be captured."""

    device: torch.device
    kernels: Kernels
    graph_kernels: GraphKernels | None


def open_backend(asked: Device, cpu_kernels: Callable[[], Kernels]) -> Backend:
    """What was asked for; ``cpu_kernels`` makes a CPU's kernels. Raises ConfigError if it is not there."""
    device = _device(asked)
    if device.type == "cpu":
        return Backend(device, cpu_kernels(), None)
    try:
        from pdserve_kernels.triton.triton_kernels import TritonKernels
    except ImportError as exc:
        raise ConfigError("a GPU needs Triton: pip install 'pdserve[gpu]', or --device cpu") from exc
    kernels = TritonKernels(torch.cuda.get_device_properties(device).multi_processor_count)
    return Backend(device, kernels, kernels)


def _device(asked: Device) -> torch.device:
    found = torch.cuda.is_available()
    match asked:
        case Device.CPU:
            return CPU
        case Device.AUTO:
            return torch.device("cuda", 0) if found else CPU
        case Device.CUDA:
            if not found:
                raise ConfigError("--device cuda: torch finds no CUDA device here")
            return torch.device("cuda", 0)
