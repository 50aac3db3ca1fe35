"""What measures many nodes still runs: four of them, at a real proxy."""

from __future__ import annotations

import pytest

from lab.scale.__main__ import PLAYERS, measure_policy, measure_rack, players, proxy
from pdserve.config import RoutingPolicy
from pdserve.process import free_port

pytestmark = pytest.mark.integration


@pytest.mark.timeout(120)
def test_nodes_that_are_played_register_answer_and_are_lost() -> None:
    port, control = free_port(), free_port()
    policy = RoutingPolicy.LEAST_LOADED
    with proxy(port, control, 1, policy) as at, players(f"tcp://127.0.0.1:{control}", PLAYERS) as played:
        at.wait_for(PLAYERS)
        figures = measure_policy(at, policy, idle=0.0, rate=50.0, seconds=0.2)
        assert figures.failed == 0
        assert figures.p50_ms > 0
        rack = measure_rack(at, played[-1], PLAYERS - 1)
        assert rack.known_s > 0
