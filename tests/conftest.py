"""Fixtures for every test, and how tests are shared out to the processes of ``pytest -n``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from pdserve.config import CpuKernels
from pdserve.engine.runner_loading import cpu_kernels
from pdserve.models.checkpoint.demo import demo_model_dir
from pdserve.settings import cache_folder

TESTS = Path(__file__).parent
INTEGRATION = ("attacks", "cluster", "faults", "hosts")
"""Folders whose tests start whole clusters. Elsewhere, a module says so with ``pytestmark``."""
ONE_CLUSTER = ("attacks", "cluster", "hosts")
"""Folders whose modules share a cluster: all of them run in one process, so that it is started once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in INTEGRATION:
            item.add_marker(pytest.mark.integration)


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """Runs the tests of a module, or of a folder with one cluster for all, in one process, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::", 1)[0]
        folder = Path(module).parts[1] if module.startswith("tests/") else ""
        return folder if folder in ONE_CLUSTER else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., object]) -> ByModule:
    return ByModule(config, log)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct; converted once into the user's cache, as ``pdserve up`` would.

    So are the CPU kernels compiled: not by the first node, while a test waits for it.
    """
    cache = cache_folder(os.environ)
    cpu_kernels(CpuKernels.AUTO, cache)
    return demo_model_dir(cache)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, each on an event loop of its own."""
    return "asyncio"
