"""Tests how parts of machines with different clocks become one timeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.tracing.timeline import joined_timeline, on_our_clock
from pdserve.wire.timeline import (
    Gap,
    Gaps,
    Moment,
    MomentKind,
    Phase,
    PhaseKind,
    ProcessKind,
    RecalledParts,
    Timeline,
    TimelinePart,
    TraceContext,
)
from tests.examples import examples


def part(process: ProcessKind, start_s: float, end_s: float | None, *, error_s: float = 0.0) -> TimelinePart:
    return TimelinePart(request_id="r", process=process, start_s=start_s, end_s=end_s, clock_error_s=error_s)


def joined(*parts: TimelinePart) -> Timeline:
    timeline = joined_timeline("r", parts, now_s=100.0, unix_s=1e9)
    assert timeline is not None
    return timeline


@settings(max_examples=examples(50))
@given(
    difference_s=st.floats(-1e6, 1e6),
    there_s=st.floats(0, 1),
    taken_s=st.floats(0, 1),
    back_s=st.floats(0, 1),
)
def test_the_true_time_lies_within_the_stated_error(
    difference_s: float, there_s: float, taken_s: float, back_s: float
) -> None:
    """The node's clock shows ours plus a difference that nobody knows."""
    asked_s, event_s = 50.0, 40.0
    answered_s = asked_s + there_s + taken_s + back_s
    now_s = asked_s + there_s + taken_s + difference_s
    theirs = part(ProcessKind.ENGINE, event_s + difference_s, event_s + difference_s + 1)
    (ours,) = on_our_clock(RecalledParts(now_s, taken_s, (theirs,)), asked_s, answered_s)
    assert abs(ours.start_s - event_s) <= ours.clock_error_s + 1e-6
    assert ours.clock_error_s <= (there_s + back_s) / 2 + 1e-6


def test_times_count_from_the_arrival_at_the_proxy() -> None:
    engine = TimelinePart(
        request_id="r",
        process=ProcessKind.ENGINE,
        start_s=91.0,
        end_s=94.0,
        phases=(Phase(kind=PhaseKind.DECODE, start_s=92.0, end_s=94.0, span_id=b"s" * 8),),
        moments=(Moment(kind=MomentKind.FIRST_TOKEN, at_s=92.0),),
        gaps=Gaps((1,), (Gap(93.0, 0.5),)),
        trace=TraceContext(b"t" * 16, b"s" * 8),
        span_id=b"s" * 8,
    )
    timeline = joined(engine, part(ProcessKind.PROXY, 90.0, 95.0))
    assert (timeline.began, timeline.duration_s, timeline.finished) == (1e9 - 10, 5.0, True)
    proxy, other = timeline.parts
    assert (proxy.process, proxy.start_s, proxy.end_s) == (ProcessKind.PROXY, 0.0, 5.0)
    assert (other.start_s, other.phases[0].end_s, other.moments[0].at_s) == (1.0, 4.0, 2.0)
    assert other.gaps == Gaps((1,), (Gap(3.0, 0.5),))
    assert (other.trace, other.span_id, other.phases[0].span_id) == (None, b"", b"")


def test_of_two_requests_with_one_id_the_newer_one_is_shown() -> None:
    older = (part(ProcessKind.PROXY, 80.0, 85.0), part(ProcessKind.ENGINE, 81.0, 84.0))
    newer = (part(ProcessKind.PROXY, 90.0, 95.0), part(ProcessKind.ENGINE, 91.0, 94.0))
    timeline = joined(*newer, *older)
    assert [shown.start_s for shown in timeline.parts] == [0.0, 1.0]
    assert timeline.duration_s == 5.0


def test_a_lane_may_seem_to_begin_before_its_proxy_by_the_clocks_error() -> None:
    early = part(ProcessKind.ENGINE, 89.5, 94.0, error_s=1.0)
    assert len(joined(part(ProcessKind.PROXY, 90.0, 95.0), early).parts) == 2


def test_a_request_under_way_lasts_until_now() -> None:
    timeline = joined(part(ProcessKind.PROXY, 90.0, None), part(ProcessKind.PREFILL_ENGINE, 91.0, 92.0))
    assert (timeline.duration_s, timeline.finished) == (10.0, False)


def test_without_a_proxy_only_the_newest_of_several_requests_with_one_id_is_told() -> None:
    def api(start_s: float, attempt: int) -> TimelinePart:
        return TimelinePart(
            request_id="r", process=ProcessKind.API, start_s=start_s, end_s=start_s + 1, attempt=attempt
        )

    older = (api(10.0, 0), part(ProcessKind.ENGINE, 10.1, 11.0), api(12.0, 1), part(ProcessKind.ENGINE, 12.1, 13.0))
    newer = (api(20.0, 0), part(ProcessKind.PREFILL_ENGINE, 20.1, 20.5), api(22.0, 2))
    found = joined(*newer, *older)
    assert [one.start_s for one in found.parts] == pytest.approx([0.0, 0.1, 2.0])
    assert len(joined(*older).parts) == 4, "attempts of one request stay together"
    assert len(joined(*older, *newer[1:]).parts) == 6, "nobody tells where the newer one began"
    assert len(joined(*newer[1:2], part(ProcessKind.ENGINE, 30.0, 31.0)).parts) == 2


def test_without_a_proxy_the_first_lane_begins_it() -> None:
    timeline = joined(part(ProcessKind.ENGINE, 91.0, 96.0), part(ProcessKind.API, 90.0, 95.0))
    assert [shown.process for shown in timeline.parts] == [ProcessKind.API, ProcessKind.ENGINE]
    assert timeline.duration_s == 6.0


@pytest.mark.parametrize("silent", [(), ("decode-0",)])
def test_nobody_remembers_anything(silent: tuple[str, ...]) -> None:
    assert joined_timeline("r", [], 0.0, 0.0, silent) is None
