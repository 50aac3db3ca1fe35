"""A seed that fails is shown with few requests and faults, which are short, early and plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.simulation import run
from lab.simulation.plan import LEAST_S, Fault, FaultKind, Plan, PlannedRequest
from lab.simulation.run import Result, shrunk


def _result(plan: Plan) -> Result:
    """Returns what a defect shows that one kind of fault brings out, and a request of some length."""
    killed = any(fault.kind is FaultKind.KILL and fault.lasts_s >= 0.2 for fault in plan.faults)
    long = any(request.max_tokens >= 5 for request in plan.requests)
    return Result(("a defect",) if killed and long else (), (), "", (), 0.0, 0)


def test_a_plan_is_shrunk_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_plan", lambda _, plan: _result(plan))
    request = PlannedRequest(1.5, (3, 4, 5, 6, 7, 8, 9), 40, salt="salt", choices=3, seed=7)
    faults = tuple(Fault(2.0, kind, 1, 5.0, amount=300) for kind in tuple(FaultKind)[:8])
    plan = shrunk(1, Plan(requests=(replace(request, max_tokens=1), request, request), faults=faults))
    assert len(plan.faults) == len(plan.requests) == 1
    fault, left = plan.faults[0], plan.requests[0]
    assert fault.kind is FaultKind.KILL
    assert 0.2 <= fault.lasts_s < 0.4
    assert fault.amount == 1
    assert max(fault.at_s, left.at_s) <= LEAST_S
    assert left == PlannedRequest(left.at_s, (3,), 5)


def test_a_plan_that_violates_nothing_smaller_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_plan", lambda *_: Result((), (), "", (), 0.0, 0))
    plan = Plan(requests=(PlannedRequest(1.0, (3, 4), 5),), faults=(Fault(1.0, FaultKind.STOP, 0, 1.0),))
    assert shrunk(1, plan) == plan
