"""Which device an engine gets."""

from __future__ import annotations

import pytest
import torch

from pdserve.config import Device
from pdserve.errors import ConfigError
from pdserve.models.device import open_device


@pytest.mark.parametrize(
    ("asked", "gpu", "transfers", "kind"),
    [
        (Device.AUTO, True, False, "cuda"),
        (Device.AUTO, True, True, "cpu"),
        (Device.AUTO, False, False, "cpu"),
        (Device.CPU, True, False, "cpu"),
        (Device.CUDA, True, False, "cuda"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, asked: Device, gpu: bool, transfers: bool, kind: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert open_device(asked, transfers).type == kind


@pytest.mark.parametrize(("gpu", "transfers", "why"), [(False, False, "no CUDA device"), (True, True, "transferred")])
def test_a_gpu_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, transfers: bool, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(ConfigError, match=why):
        open_device(Device.CUDA, transfers)
