"""Simulated proxies of several workers: dead and hung ones are replaced; defects between processes are noticed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from lab.simulation.clients import Outcome
from lab.simulation.cluster import WORKER_LOST_S
from lab.simulation.defects.mutants import Mutant
from lab.simulation.plan import Fault, FaultKind, Plan, PlannedRequest, Shape
from lab.simulation.run import run_plan
from pdserve.errors import PdserveError
from pdserve.wire.discovery import Role
from pdserve_proxy import server as proxy_server
from pdserve_proxy.workers import supervisor

pytestmark = pytest.mark.integration

SHAPE = Shape(workers=2, step_s=0.02)


def _requests(count: int) -> tuple[PlannedRequest, ...]:
    return tuple(PlannedRequest(0.2 * i, (7, 8, 9, 10 + i), 20, returns=True) for i in range(count))


@pytest.mark.parametrize("kind", [FaultKind.KILL_WORKER, FaultKind.STOP_WORKER])
def test_a_worker_that_dies_or_hangs_is_replaced(kind: FaultKind) -> None:
    result = run_plan(1, Plan(SHAPE, _requests(6), (Fault(0.4, kind, 0, 10.0, other=0),)))
    assert result.violations == ()
    assert result.outcomes[:6] == (Outcome.COMPLETE,) * 6
    assert sum("proxy's worker 0 ended with -9" in line for line in result.lines) == 1
    assert any("another one is started" in line for line in result.lines)


def _kills(count: int) -> tuple[Fault, ...]:
    """Kills worker 0 each time: the new one is the last of the two."""
    return tuple(Fault(0.4 + 0.5 * i, FaultKind.KILL_WORKER, 0, 0.1, other=int(i > 0)) for i in range(count))


def test_a_proxy_that_gives_up_because_of_its_workers_is_started_again() -> None:
    result = run_plan(1, Plan(SHAPE, _requests(4), _kills(supervisor.MAX_DEATHS)))
    assert result.violations == ()
    assert sum(" proxy fails: WorkerDied: " in line for line in result.lines) == 1
    assert sum(" proxy ended with 1" in line for line in result.lines) == 1


def test_a_proxy_that_ends_long_after_it_has_lost_a_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that gives up for another reason."""
    serve, gives_up_s = proxy_server.run, [30.0]

    async def give_up(*arguments: Any) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(serve(*arguments), gives_up_s[0])
            return
        raise supervisor.WorkerDied("a defect") if gives_up_s[0] > WORKER_LOST_S else PdserveError("a defect")

    monkeypatch.setattr(proxy_server, "run", give_up)
    assert "the proxy ended by itself with 1" in run_plan(1, Plan(SHAPE, (), _kills(1))).violations
    gives_up_s[0] = 5.0
    assert "the proxy ended by itself with 1" in run_plan(1, Plan(SHAPE, (), _kills(1))).violations


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
        Plan(SHAPE, _requests(6), (Fault(0.4, FaultKind.STOP_WORKER, 0, 60.0, other=0),)),
        "has no outcome",
    ),
    Noticed(
        Mutant(
            "nodes do not rest after a move",
            1,
            "pdserve_proxy.roles.RoleDecider",
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
