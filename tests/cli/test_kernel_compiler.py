"""Tests that ``pdserve up`` compiles the CPU kernels beside it when they are needed, and leaves no compiler behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli.up import kernel_compiler
from pdserve.cli.up.kernel_compiler import compiling_kernels, computes_on_cpu
from pdserve.config import CpuConfig, CpuKernels, Device, ModelConfig, NodeConfig
from pdserve.process import ChildProcess
from tests.eventually import eventually


@pytest.mark.parametrize(
    ("device", "kernels", "driver", "wanted"),
    [
        (Device.AUTO, CpuKernels.AUTO, False, True),
        (Device.AUTO, CpuKernels.AUTO, True, False),
        (Device.CPU, CpuKernels.COMPILED, True, True),
        (Device.CPU, CpuKernels.TORCH, False, False),
        (Device.CUDA, CpuKernels.AUTO, False, False),
    ],
)
def test_they_are_compiled_where_a_cpu_computes(
    device: Device, kernels: CpuKernels, driver: bool, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_compiler, "NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
    node = NodeConfig(model=ModelConfig(device=device), cpu=CpuConfig(kernels=kernels))
    assert computes_on_cpu(node) is wanted


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ChildProcess]]:
    """Yields the processes that are started."""
    children: list[ChildProcess] = []
    start = ChildProcess.__init__

    def note(child: ChildProcess, *args: object, **options: object) -> None:
        start(child, *args, **options)  # type: ignore[arg-type]
        children.append(child)

    monkeypatch.setattr(ChildProcess, "__init__", note)
    yield children


@pytest.mark.integration
def test_a_compiler_that_still_works_ends_with_the_block(started: list[ChildProcess], tmp_path: Path) -> None:
    node = NodeConfig(model=ModelConfig(device=Device.CPU))
    with compiling_kernels(node, tmp_path / "cache") as progress:
        (child,) = started
        os.kill(child.pid, 0)
        compiling = eventually(progress, "the compiler has begun")
        assert 0 <= compiling.done < compiling.sources
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.integration
def test_a_compiler_that_has_ended_does_not_stay_until_the_end_of_the_block(
    started: list[ChildProcess], tmp_path: Path
) -> None:
    node = NodeConfig(model=ModelConfig(device=Device.CPU))
    file = tmp_path / "file"
    file.touch()
    # Below a file there can be no cache, so the compiler fails at once.
    with compiling_kernels(node, file / "cache") as progress:
        (child,) = started
        eventually(lambda: not Path(f"/proc/{child.pid}").exists(), "nothing is left of the compiler")
        assert progress() is None


@pytest.mark.integration
def test_a_compiler_that_begins_to_fail_costs_no_more_than_the_progress(
    started: list[ChildProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    compiler = programs / "g++"
    # It says its version once.
    compiler.write_text('#!/bin/sh\nmkdir "$0.asked" && echo one\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    with compiling_kernels(NodeConfig(model=ModelConfig(device=Device.CPU)), tmp_path / "cache") as progress:
        assert (programs / "g++.asked").is_dir()
        assert len(started) == 1
        assert progress() is None


def test_without_need_none_is_started(started: list[ChildProcess], tmp_path: Path) -> None:
    with compiling_kernels(NodeConfig(model=ModelConfig(device=Device.CUDA)), tmp_path):
        assert started == []
