"""What operators of other systems have reported in 2026: each symptom as a plan, in which it must not show.

The table of ``docs/reliability.md`` says which report each of them is, and which other tests belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from lab.simulation.clients import Outcome
from lab.simulation.plan import Fault, FaultKind, Plan, PlannedRequest, Shape
from lab.simulation.run import Result, run_plan
from pdserve.config import Disaggregation
from pdserve.wire.discovery import Role

pytestmark = pytest.mark.integration

_ENDED = re.compile(
    r"request_id=r(\d+) prefill=(\S+) source=(\S+) reason=(\S+) .* ttft_ms=(\S+) .* finish=(stop|length)"
)
TWO_DECODE = (Role.PREFILL, Role.DECODE, Role.DECODE)
TWO_PREFILL = (Role.PREFILL, Role.PREFILL, Role.DECODE)


def _prompts(
    first: int, count: int, *, at_s: float = 0.0, length: int = 20, output: int = 5
) -> tuple[PlannedRequest, ...]:
    """Prompts that begin with the token ``first`` and those after it, so that no prefix cache has anything of them."""
    return tuple(
        PlannedRequest(at_s + 0.15 * i, tuple(range(token, token + length)), output)
        for i, token in enumerate(range(first, first + count))
    )


class Ends:
    """The lines in which decode nodes say how answers came about, by the requests' numbers. The last one counts."""

    def __init__(self, result: Result) -> None:
        self._found = {int(found[1]): found for line in result.lines if (found := _ENDED.search(line)) is not None}

    def prefill(self, number: int) -> str:
        """Returns the node that has computed the prompt."""
        return self._found[number][2]

    def sources(self, numbers: Sequence[int]) -> list[str]:
        return [self._found[number][3] for number in numbers]

    def reasons(self, numbers: Sequence[int]) -> list[str]:
        return [self._found[number][4] for number in numbers]

    def ttfts_ms(self, numbers: Sequence[int]) -> list[float]:
        return [float(self._found[number][5]) for number in numbers]


def _complete(plan: Plan) -> Result:
    """Runs a plan whose clients that stay get their whole answers. Nothing else may be wrong either."""
    result = run_plan(1, plan)
    assert result.violations == ()
    outcomes = result.outcomes[: len(plan.requests)]
    assert all(outcome is Outcome.COMPLETE for outcome, one in zip(outcomes, plan.requests, strict=True) if one.stays)
    return result


def _failures(result: Result) -> Iterator[str]:
    """Yields the reasons for which fetches failed."""
    for line in result.lines:
        if (found := re.search(r"failed \((\w+)\): ", line)) is not None:
            yield found[1]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one piece"])
def test_an_answer_whose_engine_stalls_behind_its_status_200_comes_whole(stream: bool) -> None:
    """The engine process alone stands still. Its API process answers, and heartbeats go on."""
    asked = tuple(PlannedRequest(0.1 * i, (7, 8, 9, 10 + i), 40, stream=stream) for i in range(6))
    _complete(Plan(Shape(TWO_DECODE, step_s=0.02), asked, (Fault(0.4, FaultKind.STOP_ENGINE, 1, 8.0),)))


@pytest.mark.parametrize("node", [0, 1], ids=["prefill", "decode"])
def test_a_pair_serves_as_a_pair_again_when_one_of_its_roles_was_replaced(node: int) -> None:
    asked = (*_prompts(3, 3), *_prompts(6, 3, at_s=12.0))
    result = _complete(Plan(Shape(), asked, (Fault(0.6, FaultKind.KILL, node, 3.0),)))
    assert Ends(result).sources(range(6)) == ["remote"] * 6


@pytest.mark.parametrize(
    "kind", [FaultKind.CRASH_PUSH, FaultKind.CUT_ONE_WAY, FaultKind.CUT_SENDING, FaultKind.CUT_PEERS]
)
def test_a_transfer_fails_at_both_sides_when_one_of_them_can_tell_nothing(kind: FaultKind) -> None:
    """At rest no side has a session or a block of it, and nobody waits until a deadline: ``run.py`` checks both."""
    result = _complete(Plan(Shape(step_s=0.02), _prompts(3, 4), (Fault(0.02, kind, 0, 6.0),)))
    assert set(_failures(result)) & {"peer_lost", "lease_expired"}


def test_prompts_whose_kv_never_moves_are_counted_and_named() -> None:
    """All processes are healthy and ready, and no link for KV blocks leads to the prefill node, which has restarted."""
    asked = (*_prompts(3, 4, at_s=6.0), *_prompts(7, 3, at_s=30.0))
    faults = (Fault(0.0, FaultKind.KILL, 0, 1.0), Fault(0.0, FaultKind.NO_LINK, 0, 15.0))
    result = _complete(Plan(Shape(), asked, faults))
    ends = Ends(result)
    assert ends.sources(range(4)) == ["local"] * 4
    assert ends.reasons(range(4)) == ["unassigned"] * 4, "each of them has lost the only prefill node"
    assert list(_failures(result)) == ["peer_lost"] * 4
    assert ends.sources(range(4, 7)) == ["remote"] * 3


def test_a_prompt_that_is_too_long_for_the_prefill_node_is_answered_right() -> None:
    """The handshake, which comes before any prompt, tells how long one may be."""
    asked = (*_prompts(3, 3), *_prompts(6, 2, at_s=1.0, length=12), *_prompts(8, 2, at_s=2.0, length=24, output=20))
    result = _complete(Plan(Shape(max_prefill_len=16), asked))
    ends = Ends(result)
    assert ends.sources(range(7)) == ["local", "local", "local", "remote", "remote", "local", "local"]
    assert ends.reasons([0, 1, 2, 5, 6]) == ["unfit"] * 5
    assert list(_failures(result)) == []


def test_late_blocks_of_transfers_that_were_given_up_hit_nobody() -> None:
    """Clients leave while blocks come late to one rank, and the few blocks that there are go to others at once."""
    asked = tuple(
        PlannedRequest(0.05 * i, tuple(range(3 + i, 33 + i)), 8, leaves_after_s=0.02 * (1 + i % 4) if i % 2 else None)
        for i in range(16)
    )
    shape = Shape(tp_sizes=(2, 2), kv_heads=2, num_blocks=24)
    _complete(Plan(shape, asked, (Fault(0.0, FaultKind.RANK_LATE, 1, 4.0, other=1),)))


def test_a_preempted_or_fetched_request_that_aborts_leaves_no_block() -> None:
    """More answers than there are blocks for, of which two thirds leave: at rest every block is free (``run.py``)."""
    asked = tuple(
        PlannedRequest(
            0.03 * i,
            tuple(range(3 + i, 13 + i)),
            30,
            leaves_after_s=0.2 + 0.05 * (i % 5) if i % 3 else None,
            choices=1 + i % 3,
        )
        for i in range(16)
    )
    _complete(Plan(Shape(num_blocks=24, step_s=0.01), asked))


def test_short_prompts_do_not_wait_behind_long_ones_at_one_prefill_node() -> None:
    """One of two prefill nodes has long prompts for most of a second. The proxy goes on to name both in turns."""
    shape = Shape(TWO_PREFILL, disaggregation=Disaggregation.AUTO, max_num_batched_tokens=8)
    long = tuple(PlannedRequest(0.0, tuple(range(3 + i, 43 + i)), 5) for i in range(6))
    short = tuple(PlannedRequest(0.05 + 0.02 * i, tuple(range(20 + i, 32 + i)), 5) for i in range(8))
    ends = Ends(_complete(Plan(shape, (*long, *short), (Fault(0.0, FaultKind.SLOW, 0, 8.0),))))
    busy = [number for number in range(14) if ends.prefill(number).startswith("prefill0")]
    assert busy and set(busy) <= set(range(6))
    assert max(ends.ttfts_ms(range(6, 14))) < 0.25 * max(ends.ttfts_ms(busy))
