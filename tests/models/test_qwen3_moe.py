"""Tests experts: the results of ranks, with some experts or some channels each, add up to the result of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.weights import Checkpoint
from pdserve.models.parts.experts import Experts
from pdserve.models.parts.projections import Building
from pdserve.models.tp import shares
from pdserve.models.tp.shares import Alone, TpGroup
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.unsummed import Unsummed
from tests.tiny_models import save_tiny_model


def experts(folder: Path, tp: TpGroup) -> Experts:
    building = Building(Checkpoint(folder, torch.float32), TorchKernels(), tp)
    config = read_family_config(folder)
    assert config.experts is not None
    return Experts(config.hidden_size, building, config.experts, "model.layers.0.")


@pytest.mark.parametrize("least", [1, shares.LEAST_CHANNELS], ids=["channels", "experts"])
def test_ranks_add_up(least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LEAST_CHANNELS", least)
    folder = save_tiny_model("qwen3-moe", tmp_path)
    x = torch.randn(9, 60, generator=torch.Generator().manual_seed(0))
    whole = experts(folder, Alone())(x)
    parts = [experts(folder, Unsummed(rank, 3))(x) for rank in range(3)]
    assert all(not torch.allclose(part, whole) for part in parts)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-4)


def test_a_split_that_does_not_come_out_even_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="channels of an expert"):
        experts(save_tiny_model("qwen3-moe", tmp_path), Unsummed(0, 5))
