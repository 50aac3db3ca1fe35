"""Which device an engine computes on, and the kernels of a GPU."""

from __future__ import annotations

import torch

from pdserve.config import Device
from pdserve.errors import ConfigError
from pdserve_kernels.contract import GraphKernels

CPU = torch.device("cpu")


def open_device(asked: Device, transfers: bool) -> torch.device:
    """The device that was asked for. ``transfers`` says that this engine's KV cache is sent or received.

    Raises ConfigError if it is not there or cannot be used so.
    """
    found = torch.cuda.is_available()
    match asked:
        case Device.CPU:
            return CPU
        case Device.AUTO:
            return torch.device("cuda", 0) if found and not transfers else CPU
        case Device.CUDA:
            if not found:
                raise ConfigError("--device cuda: torch finds no CUDA device here")
            if transfers:
                raise ConfigError(
                    "--device cuda: a KV cache in GPU memory cannot be transferred yet; only mixed nodes can use it"
                )
            return torch.device("cuda", 0)


def open_gpu_kernels(device: torch.device) -> GraphKernels:
    """Raises ConfigError if Triton is not installed."""
    try:
        from pdserve_kernels.triton.triton_kernels import TritonKernels
    except ImportError as exc:
        raise ConfigError("a GPU needs Triton: pip install 'pdserve[gpu]', or --device cpu") from exc
    return TritonKernels(torch.cuda.get_device_properties(device).multi_processor_count)
