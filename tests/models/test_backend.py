"""Tests which device an engine computes on, and how its ranks add up their results there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdserve.config import Device, TpBackend
from pdserve.errors import ConfigError
from pdserve.models.backend import choose_device, open_backend
from pdserve.models.tp import tp_groups
from pdserve.models.tp.tp_groups import tp_backend
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kernels.triton.triton_kernels import TritonKernels


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> list[torch.device]:
    """Pretends that this machine has this number of GPUs. Returns the devices that were made the current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    )
    return current


@pytest.mark.parametrize(
    ("asked", "gpus", "rank", "ranks", "wanted"),
    [
        (Device.AUTO, 1, 0, 1, "cuda:0"),
        (Device.AUTO, 0, 0, 1, "cpu"),
        (Device.CPU, 1, 0, 1, "cpu"),
        (Device.CUDA, 1, 0, 1, "cuda:0"),
        (Device.AUTO, 4, 3, 4, "cuda:3"),
        (Device.CUDA, 4, 1, 2, "cuda:1"),
        # All ranks of a node compute on the same kind of device.
        (Device.AUTO, 1, 0, 2, "cpu"),
        (Device.AUTO, 1, 1, 2, "cpu"),
    ],
)
def test_device_and_kernels(
    monkeypatch: pytest.MonkeyPatch, asked: Device, gpus: int, rank: int, ranks: int, wanted: str
) -> None:
    current = machine(monkeypatch, gpus)
    device = choose_device(asked, rank, ranks)
    assert str(device) == wanted
    backend = open_backend(device, TorchKernels)
    assert backend.device == device
    if device.type == "cuda":
        assert current == [device]
        assert isinstance(backend.kernels, TritonKernels)
        assert backend.graph_kernels is backend.kernels
    else:
        assert isinstance(backend.kernels, TorchKernels)
        assert backend.graph_kernels is None


@pytest.mark.parametrize(
    ("gpus", "ranks", "why"),
    [
        (0, 1, "no CUDA device"),
        (2, 4, "--tensor-parallel-size 4 --device cuda needs 4 GPUs, one a rank; torch finds 2"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, why: str) -> None:
    machine(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=why):
        choose_device(Device.CUDA, 0, ranks)


@pytest.mark.parametrize(
    ("asked", "device", "ordered", "wanted"),
    [
        (TpBackend.AUTO, "cuda:1", True, TpBackend.NCCL),
        (TpBackend.NCCL, "cuda:0", True, TpBackend.NCCL),
        (TpBackend.AUTO, "cpu", True, TpBackend.SHM),
        (TpBackend.AUTO, "cpu", False, TpBackend.GLOO),
        (TpBackend.GLOO, "cpu", True, TpBackend.GLOO),
    ],
)
def test_how_ranks_add_up(
    monkeypatch: pytest.MonkeyPatch, asked: TpBackend, device: str, ordered: bool, wanted: TpBackend
) -> None:
    monkeypatch.setattr(tp_groups, "ordered_stores", lambda: ordered)
    assert tp_backend(asked, torch.device(device)) is wanted


@pytest.mark.parametrize(
    ("asked", "device", "ordered", "why"),
    [
        (TpBackend.NCCL, "cpu", True, "nccl is for GPUs, and the ranks compute on CPUs; take shm"),
        (TpBackend.NCCL, "cpu", False, "nccl is for GPUs, and the ranks compute on CPUs; take gloo"),
        (TpBackend.SHM, "cuda:0", True, "shm is for CPUs, and the ranks compute on GPUs; take nccl"),
        (TpBackend.GLOO, "cuda:0", True, "gloo is for CPUs, and the ranks compute on GPUs; take nccl"),
        (TpBackend.SHM, "cpu", False, "shm needs an x86 CPU"),
    ],
)
def test_a_way_to_add_up_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: TpBackend, device: str, ordered: bool, why: str
) -> None:
    monkeypatch.setattr(tp_groups, "ordered_stores", lambda: ordered)
    with pytest.raises(ConfigError, match=why):
        tp_backend(asked, torch.device(device))
