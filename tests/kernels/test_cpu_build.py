"""Compiling the CPU kernels: once, whoever asks at the same time, and without harm where it cannot be done."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from pdserve_kernels.cpu.build import BuildError, built_library

from pdserve.config import CpuKernels
from pdserve.engine.kernel_set import cpu_kernels
from pdserve.errors import ConfigError
from pdserve.settings import cache_folder
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.cpu import build
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.library import Library
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kernels.layout import KvLayout

SMALL_SOURCES = {"one.cpp": 'extern "C" int one() { return 1; }\n', "two.cpp": 'extern "C" int two() { return 2; }\n'}


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that compiles in no time, in the place of the kernels."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name, text in SMALL_SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def fake_compiler(folder: Path, script: str) -> str:
    """A folder to search for a compiler in, which holds this one."""
    folder.mkdir()
    program = folder / build.COMPILER
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def counting_compiler(folder: Path, count: Path) -> str:
    real = shutil.which(build.COMPILER)
    return fake_compiler(folder, f'case "$*" in *" -c "*) echo x >> {count};; esac\nexec {real} "$@"')


def _build(cache: str, search_path: str, sources: str) -> str:
    build.SOURCES = Path(sources)
    return str(built_library(Path(cache), search_path))


def test_processes_that_ask_at_the_same_time_compile_once(small_sources: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = counting_compiler(tmp_path / "bin", count)
    arguments = (str(tmp_path / "cache"), path, str(small_sources))
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        made = pool.starmap(_build, [arguments] * 3)
    assert len(set(made)) == 1
    assert count.read_text() == "x\n"
    assert [entry.name for entry in Path(made[0]).parent.iterdir() if entry.name.startswith(".")] == []


def test_a_library_is_named_for_all_that_it_depends_on(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = built_library(cache)
    assert built_library(cache) == first
    (small_sources / "one.cpp").write_text('extern "C" int one() { return 11; }\n')
    edited = built_library(cache)
    monkeypatch.setattr(build, "_cpu", lambda: "another CPU")
    elsewhere = built_library(cache)
    assert len({first, edited, elsewhere}) == 3


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


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "cannot be compiled"),
        ('case "$*" in --version) echo 1;; *) echo no such flag >&2; exit 1;; esac', "no such flag"),
        ('case "$*" in --version) echo 1;; *) exec sleep 60;; esac', "timed out"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.5)
    cache = tmp_path / "cache"
    with pytest.raises(BuildError, match=message):
        built_library(cache, fake_compiler(tmp_path / "bin", script))
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob(".*/"))


def test_a_cache_that_cannot_be_written_is_no_catastrophe(small_sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(BuildError, match="cannot be compiled"):
        built_library(tmp_path / "cache")


def test_a_builder_that_hangs_is_not_waited_for_forever(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LOCK_TIMEOUT_S", 0.2)
    target = built_library(tmp_path)
    target.unlink()
    with FileLock(target.with_suffix(".lock")), pytest.raises(BuildError, match="another process"):
        built_library(tmp_path)


def test_a_library_that_is_not_one_is_refused(tmp_path: Path, small_sources: Path) -> None:
    (tmp_path / "broken.so").write_bytes(os.urandom(100))
    for path in (tmp_path / "broken.so", built_library(tmp_path)):
        with pytest.raises(BuildError, match="cannot be loaded"):
            Library(path)


@pytest.fixture(scope="module")
def compiled() -> CompiledKernels:
    return CompiledKernels(cache_folder(os.environ))


def test_what_does_not_fit_is_refused_before_memory_is_touched(compiled: CompiledKernels) -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="a norm of"):
        compiled.rms_norm(x, torch.randn(9), 1e-5)
    with pytest.raises(ValueError, match="a norm of"):
        compiled.rms_norm(x, torch.randn(8).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="cannot be added"):
        compiled.add_rms_norm(x, torch.randn(3, 8), torch.randn(8), 1e-5)
    with pytest.raises(TypeError, match="float64"):
        compiled.silu_and_mul(x.double())


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
