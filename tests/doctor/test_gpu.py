"""Tests GPUs as torch reports them."""

from __future__ import annotations

from pdserve.doctor.finding import Verdict
from pdserve.doctor.machine import GpuFacts, check_gpus, read_gpus


def test_gpus() -> None:
    assert check_gpus(GpuFacts(("H200",), "12.8", True)).verdict is Verdict.OK
    assert check_gpus(GpuFacts((), "", False)).verdict is Verdict.NOT_APPLICABLE
    cpu_build, lost = check_gpus(GpuFacts((), "", True)), check_gpus(GpuFacts((), "12.8", True))
    assert cpu_build.verdict is lost.verdict is Verdict.WARNING
    assert "CUDA" in cpu_build.advice and "nvidia-smi" in lost.advice


def test_this_machine_is_read() -> None:
    import torch

    assert len(read_gpus().names) == torch.cuda.device_count()
