"""Fixtures for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.config import CpuKernels
from pdserve.engine.kernel_set import cpu_kernels
from pdserve.models.demo import demo_model_dir
from pdserve.settings import cache_folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; converted once into the user's cache, as ``pdserve up`` would.

    So are the CPU kernels compiled: not by the first node, while a test waits for it.
    """
    cache = cache_folder(os.environ)
    cpu_kernels(CpuKernels.AUTO, cache)
    return demo_model_dir(cache)
