"""Tests models whose GGUF file is in several parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.config import CpuKernels, Dtype, ModelConfig, Weights
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.fingerprint import fingerprint
from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.gguf.tensors import GgufTensors
from pdserve.models.checkpoint.model_files import resolve_model, served_model_name
from pdserve.models.checkpoint.weight_form import parameters, weight_bytes
from pdserve.models.checkpoint.weights import ALL, stays_in_blocks
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "folder")


@pytest.fixture
def first(folder: Path, tmp_path: Path) -> Path:
    return save_tiny_gguf(folder, tmp_path / "tiny.gguf", split=10)


def test_each_part_stands_for_the_model(folder: Path, first: Path, tmp_path: Path) -> None:
    whole = save_tiny_gguf(folder, tmp_path / "whole.gguf")
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) > 2
    assert parts[0] == first
    wanted = GgufTensors(whole)
    for part in parts:
        assert resolve_model(str(part)) == first
        assert served_model_name(str(part), first) == "tiny"
        assert read_family_config(part) == read_family_config(whole)
        found = GgufTensors(part)
        assert set(found.names()) == set(wanted.names())
        for name in wanted.names():
            own, other = (each.read(name, ALL, ALL, torch.float32) for each in (found, wanted))
            assert torch.equal(own, other), name
    assert parameters(first) == parameters(whole)
    assert stays_in_blocks(first, ModelConfig(dtype=Dtype.BF16), kernels=True) is False
    blocks = ModelConfig(dtype=Dtype.BF16, weights=Weights.AUTO)
    assert weight_bytes(first, blocks, CpuKernels.COMPILED) == sum(part.stat().st_size for part in parts)


def test_each_part_counts_for_the_fingerprint(first: Path, tmp_path: Path) -> None:
    before = fingerprint(first)
    last = max(tmp_path.glob("tiny-*.gguf"))
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert fingerprint(first) != before


def test_a_missing_part_is_named(first: Path, tmp_path: Path) -> None:
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    parts[1].unlink()
    with pytest.raises(ModelError, match=f"one of {len(parts)} parts of a model, and {parts[1].name} of .* cannot be"):
        read_gguf(parts[2])


def test_parts_with_each_others_names_are_refused(first: Path, tmp_path: Path) -> None:
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    parts[1].rename(tmp_path / "other")
    parts[2].rename(parts[1])
    (tmp_path / "other").rename(parts[2])
    with pytest.raises(ModelError, match=f"{parts[1].name} is not part 2 of {len(parts)}"):
        read_gguf(first)
