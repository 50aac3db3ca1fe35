"""Fixtures for every test, and how tests are shared out to the processes of ``pytest -n``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from pdserve.config import CpuKernels
from pdserve.models.checkpoint.demo import demo_model_dir
from pdserve.settings import cache_folder

TESTS = Path(__file__).parent
INTEGRATION = ("attacks", "cluster", "faults", "hosts")
"""Folders whose tests start whole clusters. Elsewhere, a module says so with ``pytestmark``."""
ONE_CLUSTER = ("attacks", "cluster", "hosts")
"""Folders whose modules share a cluster: all of them run in one process, so that it is started once."""

# Threads that share a few cores with other processes would spin for cores that others have. Torch reads this when it
# is loaded, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

VOCABULARY = 49_152
"""The demo model's tokenizer's: what a text becomes has to be in the model."""


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
    # Not before: it loads torch, which many tests do not need.
    from pdserve.engine.runner_loading import cpu_kernels

    cache = cache_folder(os.environ)
    cpu_kernels(CpuKernels.AUTO, cache)
    return demo_model_dir(cache)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, each on an event loop of its own."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers with the demo model's tokenizer. Its nodes start and answer quickly."""
    return _tiny_model(demo_model, tmp_path_factory, 3)


@pytest.fixture(scope="session")
def slow_tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of many layers: its nodes start as quickly, and a step takes long enough for something to happen in it."""
    return _tiny_model(demo_model, tmp_path_factory, 48)


def _tiny_model(tokenizer: Path, folders: pytest.TempPathFactory, layers: int) -> Path:
    # Not before: it loads the models of transformers, which most tests do not need.
    from tests.tiny_models import save_tiny_chat_model

    shape = {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": 2048}
    return save_tiny_chat_model(tokenizer, folders.mktemp("tiny"), **shape)
