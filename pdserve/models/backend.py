"""Chooses the device that an engine computes on, and the kernels for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.config import Device
from pdserve.errors import ConfigError
from pdserve_kernels.contract import BlockKernels, GraphKernels, Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and the kernels for it."""

    device: torch.device
    kernels: Kernels
    graph_kernels: GraphKernels | None
    """The same kernels if they can be captured."""
    block_kernels: BlockKernels | None = None
    """The same kernels if they multiply from weights in blocks."""


def open_backend(device: torch.device, cpu_kernels: Callable[[], Kernels]) -> Backend:
    """Returns the kernels for ``device``, and makes it the current device if it is a GPU.

    ``cpu_kernels`` is called for the kernels of a CPU. Raises ConfigError if there are none for a GPU.
    """
    if device.type == "cpu":
        own = cpu_kernels()
        return Backend(device, own, None, own if isinstance(own, CompiledKernels) else None)
    try:
        from pdserve_kernels.triton.triton_kernels import TritonKernels
    except ImportError as exc:
        raise ConfigError("a GPU needs Triton: pip install 'pdserve[gpu]', or --device cpu") from exc
    # Triton launches on the current device, wherever its arguments are.
    torch.cuda.set_device(device)
    kernels = TritonKernels.of(device)
    return Backend(device, kernels, kernels, kernels)


def choose_device(asked: Device, rank: int = 0, ranks: int = 1) -> torch.device:
    """Returns the device of rank ``rank`` of ``ranks``: GPU number ``rank`` of those that torch sees, or the CPU.

    Raises ConfigError if the device that was asked for is not there.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = torch.device("cuda", rank)
    match asked:
        case Device.CPU:
            return CPU
        case Device.AUTO:
            return own if found >= ranks else CPU
        case Device.CUDA:
            if not found:
                raise ConfigError("--device cuda: torch finds no CUDA device here")
            if found < ranks:
                raise ConfigError(
                    f"--tensor-parallel-size {ranks} --device cuda needs {ranks} GPUs, one a rank; torch finds {found}"
                )
            return own
