"""Simulated nodes of several tensor-parallel ranks: the real ranks' programs, channels and transfer threads."""

from __future__ import annotations

import pytest

from tests.simulation.clients import Outcome
from tests.simulation.plan import Plan, PlannedRequest, Shape
from tests.simulation.run import run_plan

pytestmark = pytest.mark.integration
_LONG_PROMPTS = tuple(PlannedRequest(0.1 * i, tuple(range(3 + i, 23 + i)), 12) for i in range(4))


@pytest.mark.parametrize(("tp_sizes", "kv_heads"), [((2, 2), 2), ((1, 2), 2), ((2, 1), 4), ((2, 4), 1)])
def test_prompts_reach_every_rank(tp_sizes: tuple[int, ...], kv_heads: int) -> None:
    """Also where two nodes have different numbers of ranks, and where several ranks have the same KV head."""
    result = run_plan(7, Plan(Shape(tp_sizes=tp_sizes, kv_heads=kv_heads), _LONG_PROMPTS))
    assert result.violations == ()
    assert set(result.outcomes) == {Outcome.WHOLE}
    assert sum("source=remote" in line for line in result.lines) >= len(_LONG_PROMPTS)
