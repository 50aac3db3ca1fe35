"""What simulated clusters are made of: several proxies, operators, spoilt messages, crashes in the middle of things."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lab.simulation.clients import Outcome
from lab.simulation.defects.mutants import Mutant
from lab.simulation.plan import Fault, FaultKind, Plan, PlannedRequest, Shape
from lab.simulation.run import Result, run_plan

pytestmark = pytest.mark.integration


def _requests(count: int, *, returns: bool = False, stream: bool = True) -> tuple[PlannedRequest, ...]:
    return tuple(PlannedRequest(0.1 * i, (7, 8, 9, 10 + i), 40, stream=stream, returns=returns) for i in range(count))


def _clean(plan: Plan) -> Result:
    result = run_plan(1, plan)
    assert result.violations == ()
    return result


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_goes_on_at_another_proxy_when_its_own_is_killed(stream: bool) -> None:
    shape = Shape(proxies=2, step_s=0.02)
    fault = Fault(0.5, FaultKind.KILL_PROXY, 0, 5.0)
    result = _clean(Plan(shape, _requests(4, returns=True, stream=stream), (fault,)))
    assert result.outcomes[:4] == (Outcome.COMPLETE,) * 4


@dataclass(frozen=True)
class Noticed:
    """A defect, and a plan in which it shows."""

    mutant: Mutant
    plan: Plan
    text: str


_TWO_PROXIES = Plan(
    Shape(proxies=2, step_s=0.02), _requests(4, returns=True), (Fault(0.5, FaultKind.KILL_PROXY, 0, 5.0),)
)
_LONG_PROMPTS = tuple(PlannedRequest(0.15 * i, tuple(range(3 + i, 23 + i)), 5) for i in range(8))
_SPOILT = Plan(Shape(step_s=0.02), _LONG_PROMPTS, (Fault(0.0, FaultKind.SHORT, 0, 2.0),))
NOTICED = (
    Noticed(
        Mutant(
            "a client that comes back misses an event",
            1,
            "pdserve.api.replay.replayable_answers.ReplayableAnswer",
            "_position",
            "return after.events",
            "return after.events + 1",
        ),
        _TWO_PROXIES,
        "not a prefix of",
    ),
    Noticed(
        Mutant(
            "an answer is kept for ever",
            1,
            "pdserve.api.replay.replayable_answers.ReplayableAnswers",
            "_store_for_a_while",
            ", self._limits.keep_s,",
            ", 100 * self._limits.keep_s,",
        ),
        _TWO_PROXIES,
        "of the timer _store_for_a_while",
    ),
    Noticed(
        Mutant(
            "a spoilt message of a prefill node is passed over",
            1,
            "pdserve_kvtransfer.fetch.peer.FetchPeer",
            "turn",
            "elif isinstance(opened, Spoilt):",
            "elif False:",
        ),
        _SPOILT,
        "waited until its deadline",
    ),
    Noticed(
        Mutant(
            "a fetch that is over is not forgotten",
            1,
            "pdserve_kvtransfer.fetch.peer.FetchPeer",
            "_drop_if_ended",
            "del self._tags[session.tag]",
            "pass",
        ),
        Plan(requests=_requests(2)),
        "fetching: request_id=r",
    ),
    Noticed(
        Mutant(
            "a proxy forgets the priority",
            1,
            "pdserve_proxy.relayed_routes.RelayedRoutes",
            "_forward",
            "relayed.hold_place, body.priority)",
            "relayed.hold_place, 0)",
        ),
        Plan(requests=(PlannedRequest(0.0, (7, 8, 9), 4, priority=20),)),
        "proxy gives r0 the priority 0, and its client wants 20",
    ),
)


@pytest.mark.parametrize("noticed", NOTICED, ids=lambda noticed: noticed.mutant.what)
def test_a_defect_of_the_cluster_is_noticed(noticed: Noticed) -> None:
    with noticed.mutant.applied():
        violations = run_plan(1, noticed.plan).violations
    assert any(noticed.text in violation for violation in violations), violations


@pytest.mark.parametrize("plan", [_TWO_PROXIES, _SPOILT], ids=["two proxies", "spoilt messages"])
def test_nothing_is_noticed_without_the_defect(plan: Plan) -> None:
    _clean(plan)
