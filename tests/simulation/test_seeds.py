"""Runs whole clusters in virtual time, each from one seed: nothing that the seeds bring breaks a promise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lab.simulation.clients import Outcome
from lab.simulation.plan import (
    DRAFTS_FROM,
    GROUPS_FROM,
    CacheShape,
    FaultKind,
    IntrusionKind,
    Manner,
    Plan,
    PlannedRequest,
    Shape,
    plan_of,
)
from lab.simulation.run import Result, run_plan, shrunk
from pdserve.config import Disaggregation
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import Work
from pdserve.engine.scheduling.scheduler import Scheduler
from tests.nightly import nightly

SEEDS = (
    *(2, 22, 173, 308, 359, 410, 493, 497, 568, 1044, 1087, 10_016),
    *(60_000, 70_000, 70_002, 70_005),
)
"""Together they have each fault, each manner of a client and each intrusion. The others run at night."""
FOUND = [
    2029,  # A transfer's message was dropped because a clock had jumped, and nobody noticed that it was missing.
    2424,  # A transfer's message came in part, and its request waited for it until the deadline.
    212,  # Two nodes died while a request ran there, and its client gave up before the proxies took it again.
    1376,  # A connection's end came in the same moment as the connection, and the simulation lost it.
    2618,
    10076,  # A node closed a connection before the other side knew of it, and the simulation lost that end.
    4684,  # A clock jumped, the answer to a handshake was dropped, and each prompt waited for it until its deadline.
    3102,  # A deadline came between the last event of a stream and the end of its body, and an error followed.
    51012,  # A client closed its half, its stream paused for longer than a second, and it counted as gone.
    1414,  # An answer left a node that had no free block, and the simulation took its second attempt for an error.
]
"""Seeds that once failed."""
SHRINK_RUNS = 60
NIGHTLY_SEEDS = 10_500
"""Prefill nodes of half of those from 10,000 on answer requests."""
NIGHTLY_AT_ONCE = 500


@pytest.mark.integration
def test_a_request_is_answered_by_a_prefill_and_a_decode_node() -> None:
    prompt = tuple(range(3, 20))
    result = run_plan(7, Plan(requests=(PlannedRequest(0.0, prompt, 12),)))
    assert result.violations == ()
    assert result.outcomes[0] is Outcome.COMPLETE
    assert any("source=remote" in line and "request_id=r0" in line for line in result.lines)


@pytest.mark.integration
def test_a_request_is_answered_by_a_prefill_node_that_has_nothing_to_prefill() -> None:
    late = (PlannedRequest(0.03, tuple(range(20, 24)), 12), PlannedRequest(0.03, tuple(range(30, 34)), 12))
    shape = replace(Shape(), prefill_answers=True)
    result = run_plan(7, Plan(shape, (PlannedRequest(0.0, tuple(range(3, 8)), 50), *late)))
    assert result.violations == ()
    assert set(result.outcomes) == {Outcome.COMPLETE}
    assert any("decode=prefill0.1 prefill=-" in line and "outcome=ok" in line for line in result.lines)


@pytest.mark.integration
@pytest.mark.parametrize("right", [nightly(0.0), 0.7, nightly(1.0)])
@pytest.mark.parametrize("cache", CacheShape)
def test_an_answer_with_drafts_is_the_right_one(
    right: float, cache: CacheShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Counter[str]()
    take = Scheduler._take_with_drafts

    def counted(self: Scheduler, work: Work, *others: Any) -> list[Request]:
        before = self.counters.accepted_drafts
        failed = take(self, work, *others)
        drafts["all"] += len(work.drafts)
        drafts["accepted"] += self.counters.accepted_drafts - before
        return failed

    monkeypatch.setattr(Scheduler, "_take_with_drafts", counted)
    shape = Shape(cache=cache, draft_tokens=(7, 7), right_drafts=right)
    requests = [PlannedRequest(0.1 * i, tuple(range(3, 16 + i)), 30, choices=1 + i % 2, seed=i) for i in range(4)]
    result = run_plan(7, Plan(shape, tuple(requests)))
    assert result.violations == ()
    assert drafts["all"] > 20
    if right in (0.0, 1.0):
        assert bool(drafts["accepted"]) == bool(right)


@pytest.mark.integration
def test_a_seed_decides_everything() -> None:
    """Also in another process, where sets of texts have another order."""
    seed = 13  # the quickest of the first ones with so many faults
    assert len(plan_of(seed).faults) > 2
    first = run_plan(seed, plan_of(seed))
    assert run_plan(seed, plan_of(seed)).digest == first.digest
    assert run_plan(seed + 1_000, plan_of(seed)).digest != first.digest
    told = subprocess.run(
        [sys.executable, "-m", "lab.simulation", "--seed", str(seed), "--whole"],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert f"hash {first.digest[:16]}" in told.stdout


def _check(seeds: range) -> None:
    failed = [seed for seed in seeds if run_plan(seed, plan_of(seed)).violations]
    if failed:
        seed = failed[0]
        print(f"seeds {failed} fail; the first one is shrunk now", file=sys.stderr, flush=True)
        plan = shrunk(seed, plan_of(seed), SHRINK_RUNS)
        result = run_plan(seed, plan)
        events = "\n".join((str(plan), *result.lines, *result.violations))
        message = f"seeds {failed} fail; python -m lab.simulation --seed {seed} shows this:\n{events}"
        pytest.fail(message, pytrace=False)


def test_seeds_that_fail_are_named_and_the_first_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seed: int, _: Plan) -> Result:
        return Result(("a defect",) if seed > 5 else (), (f"what happens in {seed}",), "", (), 0.0, 0)

    monkeypatch.setattr(sys.modules[__name__], "run_plan", fails)
    monkeypatch.setattr(sys.modules[__name__], "shrunk", lambda _, plan, runs: plan.calmed())
    shown = r"(?s)seeds \[6, 7\] fail.*--seed 6 .*faults=\(\).*happens in 6\na defect"
    with pytest.raises(pytest.fail.Exception, match=shown):
        _check(range(4, 8))


@pytest.mark.integration
@pytest.mark.parametrize("seed", SEEDS)
def test_no_seed_breaks_a_promise(seed: int) -> None:
    _check(range(seed, seed + 1))


def test_the_seeds_of_each_test_run_have_all_that_may_happen() -> None:
    """A change of ``plan_of`` changes what seeds bring: others have to be chosen then."""
    plans = [plan_of(seed) for seed in SEEDS]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FaultKind)
    assert {request.manner for plan in plans for request in plan.requests} == set(Manner)
    assert {intrusion.kind for plan in plans for intrusion in plan.intrusions} == set(IntrusionKind)
    shapes = [plan.shape for plan in plans]
    assert {shape.proxies for shape in shapes} == {1, 2, 3}
    assert {shape.disaggregation for shape in shapes} == {Disaggregation.ALWAYS, Disaggregation.AUTO}
    assert any(size > 1 for shape in shapes for size in shape.tp_sizes)
    assert any(shape.workers > 1 for shape in shapes)
    assert any(shape.moves_roles for shape in shapes)
    assert any(shape.prefill_answers for shape in shapes)
    assert {shape.cache for shape in shapes} == set(CacheShape)
    drafting = [shape for shape in shapes if shape.right_drafts is not None]
    assert any(len(set(shape.draft_tokens)) > 2 and 0 in shape.draft_tokens for shape in drafting)
    assert {shape.cache for shape in drafting} >= {CacheShape.WHOLE, CacheShape.STATE, CacheShape.ALL_KINDS}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_mended(seed: int) -> None:
    _check(range(seed, seed + 1))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "first",
    [
        *range(0, NIGHTLY_SEEDS, NIGHTLY_AT_ONCE),
        *(start + more for start in (GROUPS_FROM, DRAFTS_FROM) for more in (0, NIGHTLY_AT_ONCE)),
    ],
)
def test_no_seed_of_many_breaks_a_promise(first: int) -> None:
    _check(range(first, first + NIGHTLY_AT_ONCE))
