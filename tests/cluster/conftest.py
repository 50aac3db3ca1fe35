from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import ServedCluster, served


@pytest.fixture(scope="session")
def pd_cluster(demo_model: Path) -> Iterator[ServedCluster]:
    """Yields two prefill and two decode nodes in fp32, which all tests share that do not break them."""
    with served(demo_model, prefill=2, decode=2, dtype="fp32") as running:
        yield running


@pytest.fixture(scope="session")
def mixed_cluster(demo_model: Path) -> Iterator[ServedCluster]:
    """Yields one mixed node in fp32, which prefills and decodes without transfers."""
    with served(demo_model, prefill=0, decode=0, mixed=1, dtype="fp32") as running:
        yield running


@pytest.fixture(scope="session")
def tiny_pair(tiny_model: Path) -> Iterator[ServedCluster]:
    """Yields a prefill and a decode node of a tiny model, in fp32, with all that they log."""
    with served(tiny_model, dtype="fp32", log_level="debug") as running:
        yield running
