"""Tests what is noted of a request, and that it stays small whatever happens to the request."""

from __future__ import annotations

import pytest

from pdserve.tracing.timeline import LONGEST_GAPS, MAX_MOMENTS, MAX_PHASES, GapNotes, TimelineNotes
from pdserve.tracing.tracing import MAX_RECALLED, RecentParts
from pdserve.wire.timeline import Gap, MomentKind, PhaseKind, ProcessKind, TimelinePart, TraceContext

TRACE = TraceContext(b"t" * 16, b"s" * 8)


def notes(trace: TraceContext | None = None) -> TimelineNotes:
    return TimelineNotes(ProcessKind.ENGINE, "r", 10.0, trace)


def part(request_id: str, trace: TraceContext | None = None) -> TimelinePart:
    return TimelineNotes(ProcessKind.API, request_id, 0.0, trace).part(1.0)


def test_phases_come_by_their_beginning() -> None:
    noted = notes()
    noted.begin(PhaseKind.FETCH, 11.0, node="prefill-0", tokens=32)
    noted.chunk(10.5, 10.75, 16)
    noted.end(PhaseKind.FETCH, 12.0, "landed", blocks=2, moved_bytes=64, tail_s=0.25)
    chunk, fetch = noted.part(13.0).phases
    assert (chunk.kind, chunk.start_s, chunk.end_s, chunk.tokens) == (PhaseKind.CHUNK, 10.5, 10.75, 16)
    assert (fetch.node, fetch.outcome, fetch.tokens, fetch.blocks) == ("prefill-0", "landed", 32, 2)


def test_an_open_phase_ends_with_the_request() -> None:
    noted = notes()
    noted.begin(PhaseKind.ATTEMPT, 11.0)
    under_way = noted.part(12.0, ended=False)
    assert (under_way.end_s, under_way.phases[0].end_s) == (None, 12.0)
    over = noted.part(13.0)
    assert (over.end_s, over.phases[0].end_s) == (13.0, 13.0)


def test_a_phase_that_begins_again_ends_first() -> None:
    noted = notes()
    noted.begin(PhaseKind.ATTEMPT, 11.0, node="a")
    noted.begin(PhaseKind.ATTEMPT, 12.0, node="b")
    phases = noted.part(13.0).phases
    assert [(phase.node, phase.start_s, phase.end_s) for phase in phases] == [("a", 11.0, 12.0), ("b", 12.0, 13.0)]


def test_many_chunks_become_one_and_leave_room_for_what_follows() -> None:
    noted = notes()
    for number in range(1000):
        noted.chunk(float(number), number + 1.0, 8)
    noted.begin(PhaseKind.PUSH, 1000.0)
    phases = noted.part(1001.0).phases
    assert len(phases) < MAX_PHASES
    assert phases[-1].kind is PhaseKind.PUSH
    assert sum(phase.tokens for phase in phases) == 8000
    assert sum(max(1, phase.chunks) for phase in phases[:-1]) == 1000
    assert phases[-2].end_s == 1000.0


def test_a_request_that_goes_on_and_on_is_bounded() -> None:
    noted = notes()
    for number in range(500):
        noted.begin(PhaseKind.ATTEMPT, float(number))
        noted.moment(MomentKind.LOST, float(number))
    made = noted.part(501.0)
    assert (len(made.phases), len(made.moments)) == (MAX_PHASES, MAX_MOMENTS)
    assert made.left_out == 1000 - MAX_PHASES - MAX_MOMENTS


def test_what_hangs_from_a_phase_is_of_the_same_trace() -> None:
    noted = notes(TRACE)
    assert noted.context == TraceContext(TRACE.trace_id, noted.span_id)
    noted.begin(PhaseKind.FETCH, 11.0)
    context = noted.context_of(PhaseKind.FETCH)
    assert context is not None
    noted.end(PhaseKind.FETCH, 12.0)
    assert noted.part(13.0).phases[0].span_id == context.span_id
    assert noted.context_of(PhaseKind.FETCH) is None


def test_nothing_hangs_from_a_trace_that_is_not_sampled() -> None:
    noted = notes(TraceContext(TRACE.trace_id, TRACE.span_id, sampled=False))
    noted.begin(PhaseKind.FETCH, 11.0)
    assert (noted.context, noted.context_of(PhaseKind.FETCH), noted.part(12.0).trace) == (None, None, None)


@pytest.mark.parametrize(("gap_s", "bucket"), [(0.0005, 0), (0.001, 1), (0.0019, 1), (0.002, 2), (0.25, 8), (1e6, 17)])
def test_gaps_are_counted_by_powers_of_two(gap_s: float, bucket: int) -> None:
    gaps = GapNotes()
    gaps.note(gap_s, 2e6)
    summary = gaps.summary()
    assert summary is not None
    assert summary.counts == (0,) * bucket + (1,)


def test_the_longest_gaps_are_kept_in_the_order_of_time() -> None:
    gaps = GapNotes()
    for number in range(100):
        gaps.note(0.5 if number % 10 == 3 else 0.03125, float(number))
    gaps.note(2.0, 200.0)
    summary = gaps.summary()
    assert summary is not None
    assert sum(summary.counts) == 101
    assert len(summary.longest) == LONGEST_GAPS
    assert summary.longest[-1] == Gap(198.0, 2.0)
    assert [gap.start_s for gap in summary.longest] == sorted(gap.start_s for gap in summary.longest)
    assert {gap.seconds for gap in summary.longest[:-1]} == {0.5}


def test_no_token_has_no_gap() -> None:
    assert GapNotes().summary() is None


def test_only_the_newest_lanes_are_kept() -> None:
    kept = RecentParts(3)
    for request_id in "abcd":
        kept.add(part(request_id))
    assert kept.recall("a") == ()
    assert [found.request_id for found in kept.recall("d")] == ["d"]
    for _ in range(3):
        kept.add(part("e"))
    assert (len(kept.recall("e")), kept.recall("d")) == (3, ())


def test_an_id_that_everybody_uses_is_recalled_within_bounds() -> None:
    kept = RecentParts(10 * MAX_RECALLED)
    for _ in range(5 * MAX_RECALLED):
        kept.add(part("same"))
    assert len(kept.recall("same")) == MAX_RECALLED


def test_lanes_of_a_trace_are_exported_and_no_others() -> None:
    exported: list[TimelinePart] = []
    kept = RecentParts(0)
    assert not kept.wanted
    kept.export = exported.append
    kept.add(part("a"))
    kept.add(part("b", TRACE))
    assert [found.request_id for found in exported] == ["b"]
    assert kept.recall("b") == ()
    assert kept.wanted
