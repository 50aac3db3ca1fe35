from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attacks.attack import carry_out
from tests.attacks.bodies import heaviest_bodies
from tests.attacks.target import CONTEXT, Target, target
from tests.tiny_models import save_tiny_chat_model

VOCABULARY = 49_152
"""The tokenizer's vocabulary: the model has to know every token that a text becomes."""

AT_ONCE = 4


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        running = item.funcargs.get("attacked")
        if isinstance(running, Target):
            running.wasted_s += report.duration
    return report


@pytest.fixture
def attacked(cluster_under_attack: Target) -> Target:
    """Returns the cluster for one attack."""
    cluster_under_attack.check_worth_attacking()
    return cluster_under_attack


@pytest.fixture(scope="package")
def cluster_under_attack(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Yields one cluster for all attacks."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    with target(save_tiny_chat_model(demo_model, folder, **shape)) as running:
        warm_up(running)
        yield running


def warm_up(running: Target) -> None:
    """Sends the heaviest bodies, so that pools and malloc have grown before a test measures."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(lambda case: carry_out(running, case), heaviest_bodies() * AT_ONCE):
            assert done is None


@pytest.fixture(scope="module")
def unharmed(cluster_under_attack: Target) -> Iterator[None]:
    """Checks that the attacks of one module leave the cluster as it was."""
    with cluster_under_attack.unharmed():
        yield


@pytest.fixture(scope="module")
def no_prompt_lost(cluster_under_attack: Target, unharmed: None) -> Iterator[None]:
    """Checks that the attacks of a module, which should not affect transfers, cost no remote prefill."""
    before = cluster_under_attack.lost_prefills()
    yield
    cluster_under_attack.check_worth_attacking()
    # The engine sends this count now and then, and always when it becomes idle.
    cluster_under_attack.cluster.until_idle()
    assert cluster_under_attack.lost_prefills() == before
