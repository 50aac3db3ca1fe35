from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, cluster


@pytest.fixture(scope="session")
def pd_cluster(demo_model: Path) -> Iterator[Cluster]:
    """Two prefill and two decode nodes in fp32, shared by every test that does not break them."""
    with cluster(demo_model, "--dtype", "fp32", prefill=2, decode=2) as running:
        yield running


@pytest.fixture(scope="session")
def mixed_cluster(demo_model: Path) -> Iterator[Cluster]:
    """One mixed node in fp32: the colocated baseline."""
    with cluster(demo_model, "--dtype", "fp32", prefill=0, decode=0, mixed=1) as running:
        yield running
