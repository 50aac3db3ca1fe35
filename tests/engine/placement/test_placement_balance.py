"""Tests that placement finds the balance of prefill and decode nodes, which it knows by old news alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from tests.engine.placement.serving_model import CHUNK, FRESH, SPEED, News, Outcome, Speed, Workload, serve
from tests.nightly import nightly

pytestmark = pytest.mark.integration

NEWS = News(delay_s=0.25, each_s=2.0)
"""Old news: a prompt takes about a second."""


def best_of_fixed(work: Workload, shares: Sequence[float], nodes: int = 1, news: News = FRESH) -> Outcome:
    """Returns the best that is reached where a share of the prompts is local, whatever happens."""
    outcomes = [serve(work, nodes=nodes, share=share, news=news) for share in shares]
    return max(outcomes, key=lambda outcome: outcome.tokens_per_s)


@pytest.mark.parametrize(
    ("clients", "shares"), [nightly(4, (0.0, 0.2)), (8, (0.2, 0.3, 0.4)), nightly(16, (0.3, 0.35, 0.4))]
)
def test_a_decode_node_computes_the_share_that_is_best(clients: int, shares: Sequence[float]) -> None:
    work = Workload(clients)
    found, best = serve(work), best_of_fixed(work, shares)
    assert found.tokens_per_s >= 0.95 * best.tokens_per_s
    assert found.ttft_s <= 1.1 * best.ttft_s


@pytest.mark.parametrize(("nodes", "shares"), [nightly(1, (0.2, 0.3, 0.4)), (3, (0.6,)), nightly(3, (0.5, 0.6, 0.7))])
def test_old_news_cost_little_however_many_decode_nodes_share_a_prefill_node(
    nodes: int, shares: Sequence[float]
) -> None:
    """Each part of the time brings nearly as much as the others, and nobody leaves the prefill node without work."""
    work = Workload(10 * nodes)
    found, best = serve(work, nodes=nodes, news=NEWS), best_of_fixed(work, shares, nodes, NEWS)
    assert found.tokens_per_s >= 0.95 * best.tokens_per_s
    assert found.prefill_busy > 0.9
    assert statistics.stdev(found.windows) < 0.15 * statistics.mean(found.windows)


@pytest.mark.parametrize("target_itl_ms", [70, 200])
def test_the_share_keeps_the_itl_target(target_itl_ms: float) -> None:
    found = serve(Workload(8), target_itl_ms=target_itl_ms)
    assert found.itl_s <= target_itl_ms / 1000 * 1.15
    assert found.local_share > 0.2


def test_streams_beside_prompts_that_never_end_do_not_wait_for_whole_chunks() -> None:
    """Without a single step that only decodes, nothing would say how long chunks may take."""
    found = serve(Workload(16, prompt=1024, output=32, spread=0.3), seconds=60.0)
    assert found.itl_s < 0.3 * SPEED.seconds(0, CHUNK)


def test_a_fast_prefill_node_gets_all_prompts_beside_streams() -> None:
    found = serve(Workload(8), prefill_speed=Speed(token_s=0.0005))
    assert found.local_share < 0.1
