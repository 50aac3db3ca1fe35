from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, cluster


@pytest.fixture(scope="session")
def pd_cluster(demo_model: Path) -> Iterator[Cluster]:
    """Yields two prefill and two decode nodes in fp32, which all tests share that do not break them."""
    with cluster(demo_model, "--dtype", "fp32", prefill=2, decode=2) as running:
        yield running


@pytest.fixture(scope="session")
def mixed_cluster(demo_model: Path) -> Iterator[Cluster]:
    """Yields one mixed node in fp32, which prefills and decodes without transfers."""
    with cluster(demo_model, "--dtype", "fp32", prefill=0, decode=0, mixed=1) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_pair(tiny_model: Path) -> Iterator[Cluster]:
    """Yields a prefill and a decode node of a tiny model, in fp32, with all that they log."""
    with cluster(tiny_model, "--dtype", "fp32", "--log-level", "debug") as running:
        yield running
