"""Simulated nodes of several tensor-parallel ranks: the real ranks' programs, channels and transfer threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.simulation.clients import Outcome
from lab.simulation.defects.mutants import SESSION, Mutant
from lab.simulation.engine_program import SimRunner
from lab.simulation.machine.virtual_time import START_S, present_process, present_thread
from lab.simulation.plan import SETTLED_S, Fault, FaultKind, Plan, PlannedRequest, Shape
from lab.simulation.run import run_plan
from pdserve.engine.tp.rank_channel import OrderChannel
from pdserve.errors import EngineError, RankLost
from pdserve.wire.discovery import Role
from pdserve.wire.rank import Clear, Order

pytestmark = pytest.mark.integration
_LONG_PROMPTS = tuple(PlannedRequest(0.1 * i, tuple(range(3 + i, 23 + i)), 12) for i in range(4))


@pytest.mark.parametrize(("tp_sizes", "kv_heads"), [((2, 2), 2), ((1, 2), 2), ((2, 1), 4), ((2, 4), 1), ((4, 2), 2)])
def test_prompts_reach_every_rank(tp_sizes: tuple[int, ...], kv_heads: int) -> None:
    """Also where two nodes have different numbers of ranks, and where several ranks have the same KV head."""
    result = run_plan(7, Plan(Shape(tp_sizes=tp_sizes, kv_heads=kv_heads), _LONG_PROMPTS))
    assert result.violations == ()
    assert set(result.outcomes) == {Outcome.COMPLETE}
    assert sum("source=remote" in line for line in result.lines) >= len(_LONG_PROMPTS)


_LATE = Fault(0.0, FaultKind.RANK_LATE, 1, 2.0, other=1)
_CORRUPT = Fault(0.1, FaultKind.RANK_CORRUPT, 0, 2.0, other=1)
_STOPPED = Fault(0.1, FaultKind.STOP_RANK, 1, 0.7)
_TWO_RANKS = Shape(tp_sizes=(2, 2), kv_heads=2)
_LEAVING = tuple(
    PlannedRequest(0.05 * i, tuple(range(3 + i, 33 + i)), 12, leaves_after_s=0.05 * (1 + i % 5)) for i in range(12)
)


def test_a_request_that_is_cancelled_while_a_rank_is_stopped_gives_its_blocks_back() -> None:
    """The rank reports late that it is prepared, which once counted as if it had forgotten the transfer."""
    shape = replace(_TWO_RANKS, step_s=0.02, num_blocks=32)
    assert run_plan(1, Plan(shape, _LEAVING + _LONG_PROMPTS, (_STOPPED,))).violations == ()


def test_an_engine_that_loses_a_rank_long_after_one_was_stopped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that fails at once, but not because of a rank."""
    run = SimRunner.run
    for fails_at_s, exc in ((8.0, RankLost("a defect")), (0.1, EngineError("a defect"))):

        def fail(self: SimRunner, *rows: Any, since_s: float = fails_at_s, exc: Exception = exc, **more: Any) -> Any:
            if present_process().loop.time() > START_S + SETTLED_S + since_s:
                raise exc
            return run(self, *rows, **more)

        monkeypatch.setattr(SimRunner, "run", fail)
        plan = Plan(_TWO_RANKS, (replace(_LONG_PROMPTS[0], at_s=fails_at_s),), (replace(_STOPPED, lasts_s=0.05),))
        assert any("failed: " in violation for violation in run_plan(1, plan).violations)


@pytest.mark.parametrize(
    ("what", "method", "before", "after", "faults"),
    [
        (
            "a fetch is over when one rank has all its pieces",
            "complete",
            "self._left == 0",
            "any(None not in found for found in self._found)",
            (_LATE,),
        ),
        (
            "a piece of another rank than the first counts twice",
            "_note",
            "self._left -= 1",
            "self._left -= 1 + (rank > 0)",
            (),
        ),
        (
            "a corrupt piece of another rank than the first is no failure",
            "_note",
            "if expected != digest:",
            "if expected != digest and rank == 0:",
            (_CORRUPT,),
        ),
    ],
)
def test_a_defect_of_the_aggregation_is_noticed(
    what: str, method: str, before: str, after: str, faults: tuple[Fault, ...]
) -> None:
    mutant = Mutant(what, 1, f"{SESSION}.Aggregator", method, before, after)
    with mutant.applied():
        assert run_plan(1, Plan(_TWO_RANKS, _LONG_PROMPTS, faults)).violations


CLEARS_LATE = Mutant(
    "a rank may still clear blocks that go to a fetch",
    1,
    "pdserve.engine.tp.tp_runner.TpRunner",
    "clear",
    "self._ranks.wait_for_blocks()",
    "pass",
)
LATE_S = 0.8
"""What computes on a rank comes so long after the rank's transfers to the order to clear blocks."""


def test_a_rank_that_clears_blocks_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node starts while others serve. Its engine has to wait, or the rank clears what a transfer has brought."""
    receive = OrderChannel.receive

    def receive_late(channel: OrderChannel) -> Order:
        order, thread = receive(channel), present_thread()
        if isinstance(order, Clear) and thread.now() > START_S + SETTLED_S:
            thread.block(LATE_S)
        return order

    monkeypatch.setattr(OrderChannel, "receive", receive_late)
    shape = Shape((Role.PREFILL, Role.DECODE, Role.DECODE), tp_sizes=(2, 2, 2), kv_heads=2)
    requests = tuple(PlannedRequest(0.1 * i, tuple(range(3 + i % 20, 23 + i % 20)), 12) for i in range(40))
    plan = Plan(shape, requests, (Fault(0.1, FaultKind.KILL, 2, 0.1),))
    result = run_plan(1, plan)
    assert result.violations == ()
    with CLEARS_LATE.applied():
        violations = run_plan(1, plan).violations
    assert any("is not that of the request" in violation for violation in violations), violations
