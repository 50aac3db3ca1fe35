"""Makes hosts for tests where the machine allows it. CI must allow it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import NEW_TOKENS, Hosts, cluster_over, tiny_model
from tests.hosts.namespaces import Network, network, why_impossible
from tests.tiny_models import Reference


@pytest.fixture(scope="session")
def possible() -> None:
    """Skips a test, with the reason, where network namespaces are impossible, and fails it there in CI."""
    reason = why_impossible()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(demo_model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model, NEW_TOKENS)


@pytest.fixture(scope="module")
def joined(possible: None) -> Iterator[Network]:
    with network("client", "proxy", "prefill", "decode") as made:
        yield made


@pytest.fixture(scope="module")
def running(joined: Network, model: Path) -> Iterator[Hosts]:
    with cluster_over(joined, model) as made:
        yield made


@pytest.fixture
def hosts(running: Hosts) -> Iterator[Hosts]:
    """Yields the cluster, with this thread on the client's host. The cluster is unharmed before and after the test."""
    with running.network.hosts["client"].inside():
        yield running
        running.network.wire.mend()
        running.cluster.until_idle()
