"""Builds the compiled CPU kernels once for all tests."""

from __future__ import annotations

import os

import pytest

from pdserve.settings import cache_folder
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels


@pytest.fixture(scope="session")
def compiled() -> CompiledKernels:
    """Returns the compiled set. A machine that runs the tests has a compiler."""
    return CompiledKernels(cache_folder(os.environ))


@pytest.fixture(scope="session", params=["torch", "compiled"])
def kernels(request: pytest.FixtureRequest, compiled: CompiledKernels) -> Kernels:
    """Returns each CPU kernel set in turn."""
    return TorchKernels() if request.param == "torch" else compiled
