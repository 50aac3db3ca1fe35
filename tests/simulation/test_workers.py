"""Simulated proxies of several workers: dead and hung ones are replaced; defects between processes are noticed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pdserve.wire.discovery import Role
from pdserve_proxy.workers import supervisor
from tests.simulation.clients import Outcome
from tests.simulation.mutants import Mutant
from tests.simulation.plan import Fault, FaultKind, Plan, PlannedRequest, Shape
from tests.simulation.run import run_plan

pytestmark = pytest.mark.integration

SHAPE = Shape(workers=2, step_s=0.02)


def _requests(count: int) -> tuple[PlannedRequest, ...]:
    return tuple(PlannedRequest(0.2 * i, (7, 8, 9, 10 + i), 20, returns=True) for i in range(count))


@pytest.mark.parametrize("kind", [FaultKind.KILL_WORKER, FaultKind.STOP_WORKER])
def test_a_worker_that_dies_or_hangs_is_replaced(kind: FaultKind) -> None:
    result = run_plan(1, Plan(SHAPE, _requests(6), (Fault(0.4, kind, 0, 10.0, other=0),)))
    assert result.violations == ()
    assert result.outcomes[:6] == (Outcome.WHOLE,) * 6
    assert sum("proxy's worker 0 ended with -9" in line for line in result.lines) == 1
    assert any("another one is started" in line for line in result.lines)


@dataclass(frozen=True)
class Noticed:
    """A defect, and a plan in which it shows."""

    mutant: Mutant
    plan: Plan
    text: str


_ONE_KILLED = Plan(SHAPE, _requests(6), tuple(Fault(6.0, FaultKind.KILL_WORKER, 0, 0.1, other=n) for n in (0, 0)))
_BUSY = Plan(
    Shape(workers=2, step_s=0.05, max_in_flight=4, max_queued=2),
    tuple(PlannedRequest(0.05 * i, (7, 8, 9, 10 + i), 40) for i in range(10)),
)
_MOVING = Plan(
    Shape((Role.PREFILL, Role.PREFILL, Role.PREFILL, Role.DECODE), step_s=0.05, target_ttft_ms=5000, target_itl_ms=5),
    tuple(PlannedRequest(0.1 * i, tuple(range(3, 10 + i)), 30) for i in range(12)),
)
NOTICED = (
    Noticed(
        Mutant(
            "what a worker counted is forgotten with it",
            1,
            "pdserve_proxy.workers.worker_channel.WorkerChannel",
            "retire",
            "sum_families([of_nodes(self._retired, named), ended])",
            "sum_families([of_nodes(self._retired, named)])",
        ),
        _ONE_KILLED,
        "requests, and there were",
    ),
    Noticed(
        Mutant(
            "a worker that hangs is left alone",
            1,
            "pdserve_proxy.workers.worker_channel.WorkerChannel",
            "_ping",
            "health.hung.set()",
            "pass",
        ),
        Plan(SHAPE, _requests(6), (Fault(0.4, FaultKind.STOP_WORKER, 0, 60.0),)),
        "has no outcome",
    ),
    Noticed(
        Mutant(
            "nodes do not rest after a move",
            1,
            "pdserve_proxy.roles.decision.RoleDecider",
            "_look",
            "if now < group.rests_until_s or not (prefill and decode):",
            "if not (prefill and decode):",
        ),
        _MOVING,
        "after another one",
    ),
)


@pytest.mark.parametrize("noticed", NOTICED, ids=lambda noticed: noticed.mutant.what)
def test_a_defect_between_processes_is_noticed(noticed: Noticed) -> None:
    with noticed.mutant.applied():
        violations = run_plan(1, noticed.plan).violations
    assert any(noticed.text in violation for violation in violations), violations


def test_a_worker_that_takes_all_that_its_proxy_may_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_plan(1, _BUSY).violations == ()
    monkeypatch.setattr(supervisor, "worker_share", lambda config: config)
    violations = run_plan(1, _BUSY).violations
    assert any("answers under way, and its limit is 4" in violation for violation in violations), violations


def test_load_moves_a_node() -> None:
    result = run_plan(1, _MOVING)
    assert result.violations == ()
    assert any(" switching " in line for line in result.lines)
