"""Fixtures for every test, and how ``pytest -n`` distributes tests over its processes."""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from pdserve.config import CpuKernels
from pdserve.settings import cache_folder
from tests.cluster.process_forks import forks_for_all
from tests.examples import load_profiles
from tests.forks import forks_of
from tests.once import made_once

load_profiles()

TESTS = Path(__file__).parent
INTEGRATION = ("attacks", "cluster", "faults", "hosts")
"""The folders whose tests start whole clusters. In other folders, such a module has the mark in its ``pytestmark``."""
ONE_CLUSTER = ("attacks", "cluster", "hosts")
"""The folders whose modules share a cluster. One process runs them all, so that the cluster starts only once."""

# Threads wait without spinning, because they share few cores with other processes. Torch reads this when it is loaded,
# here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The processes of ``pytest -n`` are more than the cores already. Tests of several threads say so to torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test asks a hub of models beyond this machine. Those with a hub of their own say so to their processes.
os.environ["HF_HUB_OFFLINE"] = "1"

LIBRARIES = (
    *("hypothesis", "matplotlib.pyplot", "openai"),
    *("pdserve.api.node.server", "pdserve.engine.assembly", "pdserve_proxy.server", "tests.tiny_models"),
)
"""What the processes of ``pytest -n`` have from the beginning. They import what is left of these and all others."""

VOCABULARY = 4_096
"""The first tokens of the demo model, of which texts become half as many again as of all 49,152."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _folder(item.path) in INTEGRATION:
            item.add_marker(pytest.mark.integration)
    _longest_first(items)


@cache
def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0]


def _longest_first(items: list[pytest.Item]) -> None:
    """Orders modules so that all processes of ``pytest -n`` end together: what takes long is at the beginning.

    A folder with a shared cluster takes minutes in one process, and so do tests with a timeout of their own. A module
    without the mark takes seconds.
    """
    wanted = [item for item in items if not item.get_closest_marker("nightly")]
    longest = {item.path for item in wanted if item.get_closest_marker("timeout")}
    long = {item.path for item in items if item.get_closest_marker("integration")}

    @cache
    def order(path: Path) -> tuple[bool, ...]:
        folder = _folder(path)
        # A cluster that is shared ends with the last test of its folder, so nothing comes between these.
        rest = (path not in longest, folder not in INTEGRATION, path not in long)
        return (False,) if folder in ONE_CLUSTER else (True, *rest)

    items.sort(key=lambda item: order(item.path))


def pytest_configure(config: pytest.Config) -> None:
    # Modules leave little garbage, and looking for it takes a tenth of the time that loading them takes.
    gc.disable()
    # Otherwise extension modules report their objects as leaked when Python ends.
    config.add_cleanup(gc.unfreeze)
    # A process of ``pytest -n`` has sent its results by then. Python would spend two seconds on forgetting its modules.
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit.register(os._exit, 0)
    # A shell has SIGINT ignored in what it starts in the background, and so would all programs be that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # Libraries and tests are a million objects that live to the end. No collection need look at them.
    gc.freeze()
    # What tests leave is little. With Python's own number, 700, looking for it takes a twenty-fifth of their time.
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """Runs a module's tests in one process, in their order. A folder that shares a cluster counts as one module.

    Two of the processes take modules from the beginning, and the others from the end. The first ones run clusters, and
    keep the cores busy. The others run tests of one process, which wait for clocks and sockets for half of their time.
    So there are never more than two clusters, for as long as there are other tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::", 1)[0]
        folder = Path(module).parts[1] if module.startswith("tests/") else ""
        return folder if folder in ONE_CLUSTER else module

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id not in ("gw0", "gw2"):
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Has the processes of ``pytest -n`` begin as forks of one that has loaded the libraries.

    Each process imports all test modules, and the libraries take half of the nine seconds that this takes.
    """
    stack = ExitStack()
    config.add_cleanup(stack.close)
    started = stack.enter_context(forks_of(*LIBRARIES, OMP_NUM_THREADS="1"))
    forks_for_all(stack)
    for spec in specs:
        spec.python = shlex.join(started.command("tests.pytest_process"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., object]) -> ByModule:
    return ByModule(config, log)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Returns a bf16 folder of SmolLM2-135M-Instruct, which is made once in the user's cache.

    This also compiles the CPU kernels, so that no node compiles them while a test waits for it.
    """
    # The imports are here because they load torch, which many tests do not need.
    from pdserve.engine.runner_loading import cpu_kernels
    from tests.demo_folder import demo_folder

    cache = cache_folder(os.environ)
    cpu_kernels(CpuKernels.AUTO, cache)
    return demo_folder(cache)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, each on an event loop of its own."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a random Llama of three layers with the demo model's tokenizer. Its nodes start and answer quickly."""
    return _tiny_model(demo_model, tmp_path_factory, 3)


@pytest.fixture(scope="session")
def slow_tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model of many layers. Its nodes start as quickly, and a test can act during one of its steps."""
    return _tiny_model(demo_model, tmp_path_factory, 48)


def _tiny_model(tokenizer: Path, folders: pytest.TempPathFactory, layers: int) -> Path:
    shape = {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": 2048}

    def make(folder: Path) -> None:
        # The import is here because it loads the models of transformers, which most tests do not need.
        from tests.tiny_models import save_tiny_chat_model

        save_tiny_chat_model(tokenizer, folder, **shape)

    return made_once(folders, f"tiny-of-{layers}-layers", make)
