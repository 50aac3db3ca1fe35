"""Tests that the compiled CPU kernels are used where they can be built, and refuse inputs that do not fit."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from pdserve.compiled_library import BuildError, Recipe, built_library
from pdserve.config import CpuKernels
from pdserve.engine.runner_loading import cpu_kernels
from pdserve.errors import ConfigError
from pdserve.settings import cache_folder
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.library import Library
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kernels.feed_forward import Activation
from pdserve_kernels.kv_layout import KvLayout


def test_without_a_compiler_plain_torch_runs_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert isinstance(cpu_kernels(CpuKernels.AUTO, tmp_path), TorchKernels)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "there is no g++" in caplog.text
    with pytest.raises(ConfigError, match="--cpu-kernels compiled: there is no"):
        cpu_kernels(CpuKernels.COMPILED, tmp_path)
    caplog.clear()
    assert isinstance(cpu_kernels(CpuKernels.TORCH, tmp_path), TorchKernels)
    assert not caplog.records


def test_a_library_that_is_not_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(os.urandom(100))
    (tmp_path / "other.cpp").write_text('extern "C" int one() { return 1; }\n')
    other = built_library(Recipe("other", tmp_path, ("-fPIC",)), tmp_path)
    for path in (tmp_path / "broken.so", other):
        with pytest.raises(BuildError, match="cannot be loaded"):
            Library(path)


@pytest.fixture(scope="module")
def compiled() -> CompiledKernels:
    return CompiledKernels(cache_folder(os.environ))


def test_the_name_says_by_which_instructions_results_are_rounded(compiled: CompiledKernels) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    best = (
        "avx512_bf16"
        if "avx512_bf16" in flags
        else "avx512"
        if "avx512f" in flags
        else "avx2"
        if "fma" in flags
        else "baseline"
    )
    assert compiled.name == f"compiled {best}"
    assert TorchKernels().name == "torch"


def test_what_does_not_fit_is_refused_before_memory_is_touched(compiled: CompiledKernels) -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="a norm of"):
        compiled.rms_norm(x, torch.randn(9), 1e-5)
    with pytest.raises(ValueError, match="a norm of"):
        compiled.rms_norm(x, torch.randn(8).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="cannot be added"):
        compiled.add_rms_norm(x, torch.randn(3, 8), torch.randn(8), 1e-5)
    with pytest.raises(TypeError, match="float64"):
        compiled.activated(x.double(), Activation.SILU, gated=True)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (AttentionRow(1, 9, [0, 1]), ValueError),
        (AttentionRow(3, 2, [0]), ValueError),
        (AttentionRow(1, 5, [0, 8]), IndexError),
        (AttentionRow(1, 5, [0, -1]), IndexError),
    ],
)
def test_a_block_table_that_cannot_be_is_refused(
    compiled: CompiledKernels, row: AttentionRow, error: type[Exception]
) -> None:
    layout = KvLayout(kv_heads=1, num_layers=1, block_size=4, head_dim=8, dtype=torch.float32)
    with pytest.raises(error):
        compiled.plan_attention(layout, layout.allocate(8, torch.device("cpu")), [row], 2, 1.0)


def test_attention_refuses_other_shapes_and_layers(compiled: CompiledKernels) -> None:
    layout = KvLayout(kv_heads=1, num_layers=1, block_size=4, head_dim=8, dtype=torch.float32)
    cache, row = layout.allocate(2, torch.device("cpu")), AttentionRow(1, 1, [0])
    attention = compiled.plan_attention(layout, cache, [row], 2, 1.0)
    query, key_value, table = torch.randn(1, 2, 8), torch.randn(2, 1, 1, 8), torch.randn(1, 4)
    attention(0, query, key_value)
    with pytest.raises(IndexError):
        attention(1, query, key_value)
    with pytest.raises(ValueError, match="attention wants"):
        attention(0, query.bfloat16(), key_value)
    with pytest.raises(ValueError, match="attention wants"):
        attention.from_projection(0, torch.randn(2, 4, 8), table, table)
    with pytest.raises(ValueError, match="attention wants"):
        attention.from_projection(0, torch.randn(1, 4, 8), table[:, :3], table)
