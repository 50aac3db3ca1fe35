"""Builds the compiled CPU kernels once for all tests."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import patch

import pytest

from pdserve import compiled_library
from pdserve.settings import cache_folder
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu import compiled_kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.library import CPU_KERNELS, LEVELS
from pdserve_kernels.cpu.torch_kernels import TorchKernels

# Another library is compiled for it.
AVX2 = pytest.param("avx2", marks=pytest.mark.integration)


@pytest.fixture(scope="session")
def compiled() -> CompiledKernels:
    """Returns the compiled set. A machine that runs the tests has a compiler."""
    return CompiledKernels(cache_folder(os.environ))


@pytest.fixture(scope="session")
def compiled_for_avx2() -> CompiledKernels:
    """Returns the compiled set as a CPU has it with AVX2 and no more."""
    level = LEVELS[-1]
    if not level.features <= compiled_library._cpu_features():
        pytest.skip("this CPU has no AVX2")
    recipe = replace(CPU_KERNELS, native_flags=level.compile_flags, levels=())
    with patch.object(compiled_kernels, "CPU_KERNELS", recipe):
        kernels = CompiledKernels(cache_folder(os.environ))
    assert kernels.name == "compiled avx2"
    return kernels


@pytest.fixture(scope="session", params=["native", AVX2])
def each_compiled(request: pytest.FixtureRequest) -> CompiledKernels:
    """Returns the compiled set for this CPU, and then that for AVX2."""
    name = "compiled" if request.param == "native" else "compiled_for_avx2"
    kernels: CompiledKernels = request.getfixturevalue(name)
    return kernels


@pytest.fixture(scope="session", params=["torch", "compiled", AVX2])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Returns each CPU kernel set in turn."""
    if request.param == "torch":
        return TorchKernels()
    name = "compiled" if request.param == "compiled" else "compiled_for_avx2"
    kernels: CompiledKernels = request.getfixturevalue(name)
    return kernels
