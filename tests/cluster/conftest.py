from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, ServedCluster, cluster, served
from tests.cluster.test_shared_prefixes import KEYS


@pytest.fixture(scope="package")
def pd_cluster(tiny_model: Path) -> Iterator[ServedCluster]:
    """Yields two prefill and two decode nodes in fp32, which all tests share that do not break them."""
    with served(tiny_model, prefill=2, decode=2, dtype="fp32") as running:
        yield running


@pytest.fixture(scope="package")
def mixed_cluster(tiny_model: Path) -> Iterator[ServedCluster]:
    """Yields one mixed node in fp32, which prefills and decodes without transfers.

    Beside others that decode, its prompts are cut as small as any target can cut them.
    """
    with served(tiny_model, prefill=0, decode=0, mixed=1, dtype="fp32", target_itl_ms=0.001) as running:
        yield running


@pytest.fixture(scope="package")
def tiny_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yields a prefill and a decode node of a tiny model, in fp32, with all that they log, behind five proxies.

    Of the others, the first one lets prefill nodes answer. The second and the third one know ``KEYS``, and so does
    the fourth one, where all keys share their prompts.
    """
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEYS)
    keyed, logs = ("--api-key-file", str(keys)), ("--log-level", "debug")
    others = (("--prefill-answers", "on"), keyed, keyed, (*keyed, "--share-prefixes", "all"))
    with cluster(tiny_model, "--dtype", "fp32", *logs, proxy_flags=logs, others=others, forked=True) as running:
        yield running
