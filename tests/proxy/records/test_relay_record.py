"""What a relayed request leaves behind, and the part of a timeline that is made of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import msgspec
import pytest

from pdserve.tracing.timeline import MAX_MOMENTS, MAX_PHASES
from pdserve.wire.discovery import Role
from pdserve.wire.status import RequestStage
from pdserve.wire.timeline import Moment, MomentKind, Phase, PhaseKind, TimelinePart, TraceContext
from pdserve_proxy.records import relay_record
from pdserve_proxy.records.relay_record import Detours
from pdserve_proxy.relay import relayed_request
from pdserve_proxy.relay.outcomes import RelayOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.routing.router import Route
from pdserve_proxy.status.report import request_view
from tests.proxy.cluster import node_info

TRACE = TraceContext(b"t" * 16, b"c" * 8)
FIRST, SECOND = (Route(node_info(name, Role.DECODE), (node_info("p", Role.PREFILL),)) for name in ("d1", "d2"))


class Clock:
    """A clock that each look moves on by a second."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        self.now_s += 1
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (relayed_request, relay_record):
        monkeypatch.setattr(module, "time", made)
    return made


def relayed(*, exports: bool = False) -> RelayedRequest:
    task = asyncio.current_task()
    assert task is not None
    return RelayedRequest(task, "r", "/v1/x", 60.0, lambda _: None, TRACE, exports=exports)


def attempt(made: RelayedRequest, route: Route) -> None:
    made.begin_attempt(route, Attempts().begin((route.decode, 1)))


def phases(part: TimelinePart) -> list[tuple[PhaseKind, str, str]]:
    return [(phase.kind, phase.node, phase.outcome) for phase in part.phases]


async def test_a_lane_is_made_of_the_times_that_a_request_has_noted() -> None:
    made = relayed()
    made.queued()
    made.hold_place(lambda: None)
    attempt(made, FIRST)
    made.got_byte()
    made.end(RelayOutcome.OK, 200)
    part = made.record().part()
    assert [(phase.kind, phase.start_s, phase.end_s) for phase in part.phases] == [
        (PhaseKind.READ, 101.0, 102.0),
        (PhaseKind.QUEUE, 102.0, 103.0),
        (PhaseKind.ATTEMPT, 104.0, 106.0),
    ]
    assert (part.phases[2].node, part.phases[2].prefill, part.phases[2].outcome) == ("d1", "p", "ok")
    assert [(moment.kind, moment.at_s) for moment in part.moments] == [(MomentKind.FIRST_BYTE, 105.0)]
    assert (part.start_s, part.end_s, part.status, part.outcome) == (101.0, 106.0, 200, "ok")
    assert (part.trace, part.model) == (None, FIRST.decode.model)


async def test_a_lane_has_every_attempt_and_what_was_unusual() -> None:
    made = relayed()
    made.queued()
    made.hold_place(lambda: None)
    attempt(made, FIRST)
    made.attempt_failed("refused")
    attempt(made, SECOND)
    made.got_byte()
    made.note(MomentKind.LOST)
    made.begin_resuming("lost")
    assert request_view(made.record()).stage is RequestStage.RESUMING
    attempt(made, FIRST)
    made.begin_relaying(200)
    made.note(MomentKind.RESUMED, 2.5)
    made.end(RelayOutcome.OK)
    part = made.record().part()
    assert phases(part)[2:] == [
        (PhaseKind.ATTEMPT, "d1", "refused"),
        (PhaseKind.ATTEMPT, "d2", "lost"),
        (PhaseKind.ATTEMPT, "d1", "ok"),
    ]
    assert [(moment.kind, moment.node, moment.gap_s) for moment in part.moments] == [
        (MomentKind.FIRST_BYTE, "", None),
        (MomentKind.LOST, "d2", None),
        (MomentKind.RESUMED, "d1", 2.5),
    ]


async def test_an_attempt_that_begins_ends_the_one_before_it_and_its_first_byte_stays() -> None:
    made = relayed()
    attempt(made, FIRST)
    made.got_byte()
    attempt(made, SECOND)
    made.got_byte()
    part = made.record().part()
    assert phases(part)[1:] == [(PhaseKind.ATTEMPT, "d1", ""), (PhaseKind.ATTEMPT, "d2", "")]
    assert [moment.kind for moment in part.moments] == [MomentKind.FIRST_BYTE] * 2


@pytest.mark.parametrize(
    ("steps", "kinds"),
    [
        ((), [PhaseKind.READ]),
        ((RelayedRequest.queued,), [PhaseKind.READ, PhaseKind.QUEUE]),
    ],
)
async def test_what_is_under_way_ends_now_and_its_lane_has_no_end(
    steps: tuple[Callable[[RelayedRequest], None], ...], kinds: list[PhaseKind], clock: Clock
) -> None:
    made = relayed()
    for step in steps:
        step(made)
    part = made.record().part()
    assert [phase.kind for phase in part.phases] == kinds
    assert (part.phases[-1].end_s, part.end_s) == (clock.now_s, None)


async def test_nodes_hang_from_the_attempt_and_the_lane_from_the_client_where_spans_are_exported() -> None:
    made = relayed(exports=True)
    attempt(made, FIRST)
    first = made.attempt_trace
    made.attempt_failed("refused")
    attempt(made, SECOND)
    second = made.attempt_trace
    made.end(RelayOutcome.OK, 200)
    part = made.record().part()
    assert part.trace == TRACE
    assert first is not None
    assert second is not None
    assert [phase.span_id for phase in part.phases if phase.node] == [first.span_id, second.span_id]
    assert len({part.span_id, *(phase.span_id for phase in part.phases)} - {b""}) == 4


async def test_without_an_exporter_nodes_hang_from_the_client_itself() -> None:
    made = relayed()
    attempt(made, FIRST)
    assert made.attempt_trace == TRACE


def test_detours_are_bounded_and_what_is_left_out_is_counted() -> None:
    detours = Detours()
    for _ in range(MAX_PHASES + 2):
        detours.add_attempt(Phase(kind=PhaseKind.ATTEMPT, start_s=0.0, end_s=1.0))
    for _ in range(MAX_MOMENTS + 3):
        detours.add_moment(Moment(kind=MomentKind.LOST, at_s=0.0))
    assert (len(detours.attempts), len(detours.moments), detours.left_out) == (MAX_PHASES, MAX_MOMENTS, 5)


async def test_a_usual_request_leaves_one_object_that_the_collector_need_not_look_at() -> None:
    made = relayed()
    attempt(made, FIRST)
    made.end(RelayOutcome.OK, 200)
    record = made.record()
    assert not gc.is_tracked(record)
    assert (record.detours, record.span) == (None, None)
    assert not any(isinstance(value, list | dict) for value in msgspec.structs.astuple(record))
    assert not hasattr(made, "__dict__")  # with as many attributes a dict is no longer shared, and dear to make
