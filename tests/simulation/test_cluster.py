"""What simulated clusters are made of: several proxies, operators, spoilt messages, crashes in the middle of things."""

from __future__ import annotations

import pytest

from tests.simulation.clients import Outcome
from tests.simulation.plan import Fault, FaultKind, Plan, PlannedRequest, Shape
from tests.simulation.run import Result, run_plan

pytestmark = pytest.mark.integration


def _requests(count: int, *, returns: bool = False, stream: bool = True) -> tuple[PlannedRequest, ...]:
    return tuple(PlannedRequest(0.1 * i, (7, 8, 9, 10 + i), 40, stream=stream, returns=returns) for i in range(count))


def _clean(plan: Plan) -> Result:
    result = run_plan(1, plan)
    assert result.violations == ()
    return result


def _says(result: Result, text: str) -> bool:
    return any(text in line for line in result.lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_goes_on_at_another_proxy_when_its_own_is_killed(stream: bool) -> None:
    shape = Shape(proxies=2, step_s=0.02)
    fault = Fault(0.5, FaultKind.KILL_PROXY, 0, 5.0)
    result = _clean(Plan(shape, _requests(4, returns=True, stream=stream), (fault,)))
    assert result.outcomes[:4] == (Outcome.WHOLE,) * 4
