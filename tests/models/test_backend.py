"""What an engine computes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdserve.config import Device
from pdserve.errors import ConfigError
from pdserve.models.backend import open_backend
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kernels.triton.triton_kernels import TritonKernels


def machine(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


@pytest.mark.parametrize(
    ("asked", "gpu", "kind"),
    [
        (Device.AUTO, True, "cuda"),
        (Device.AUTO, False, "cpu"),
        (Device.CPU, True, "cpu"),
        (Device.CUDA, True, "cuda"),
    ],
)
def test_device_and_kernels(monkeypatch: pytest.MonkeyPatch, asked: Device, gpu: bool, kind: str) -> None:
    machine(monkeypatch, gpu)
    backend = open_backend(asked, TorchKernels)
    assert backend.device.type == kind
    if kind == "cuda":
        assert isinstance(backend.kernels, TritonKernels)
        assert backend.graph_kernels is backend.kernels
    else:
        assert isinstance(backend.kernels, TorchKernels)
        assert backend.graph_kernels is None


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu=False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        open_backend(Device.CUDA, TorchKernels)
