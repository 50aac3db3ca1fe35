"""Tests what the line after an answer says of its time, its tokens and its nodes."""

from __future__ import annotations

import pytest

from pdserve.cli.chat.server import Answer, latency_line
from pdserve.wire.timeline import Moment, MomentKind, Phase, PhaseKind, ProcessKind, Timeline, TimelinePart


def answer(**more: object) -> Answer:
    made = Answer(text="a", finish="stop", began_s=10.0, first_s=10.25, last_s=12.25)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def attempt(node: str, start_s: float) -> Phase:
    return Phase(kind=PhaseKind.ATTEMPT, start_s=start_s, end_s=start_s + 1, node=node)


def timeline(
    *attempts: Phase, moments: tuple[Moment, ...] = (), fetch: str = "", cached: int = 0, engine: str = ""
) -> Timeline:
    """``engine`` is the node whose engine remembers the request: by default that of the first attempt."""
    parts = [
        TimelinePart(request_id="r", process=ProcessKind.PROXY, start_s=0, end_s=3, phases=attempts, moments=moments)
    ]
    phases = (Phase(kind=PhaseKind.FETCH, start_s=0, end_s=1, node=fetch, outcome="landed"),) if fetch else ()
    parts.append(
        TimelinePart(
            request_id="r",
            process=ProcessKind.ENGINE,
            node=engine or attempts[0].node,
            start_s=0,
            end_s=3,
            phases=phases,
            cached_tokens=cached,
        )
    )
    return Timeline(request_id="r", began=0.0, duration_s=3.0, finished=True, parts=tuple(parts))


def test_a_server_that_says_nothing_of_nodes_is_timed() -> None:
    assert latency_line(answer(prompt_tokens=7, completion_tokens=101), None) == (
        "TTFT 250 ms, 50.0 tok/s, 7 prompt + 101 answer tokens"
    )


def test_what_the_server_has_not_said_is_not_made_up() -> None:
    assert latency_line(answer(), None) == "TTFT 250 ms, 2.25 s in all"
    assert latency_line(Answer(), None) == ""


def test_an_answer_that_was_cut_off_says_so() -> None:
    line = latency_line(answer(finish="length", prompt_tokens=1, completion_tokens=2), None)
    assert line.endswith("1 prompt + 2 answer tokens, cut off at the most tokens that it may have")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (timeline(attempt("d0", 0), fetch="p0"), "prompt at p0, answer at d0"),
        (timeline(attempt("d0", 0)), "answer at d0"),
        (timeline(attempt("d0", 0), fetch="p0", cached=32), "prompt at p0 (32 tokens were cached), answer at d0"),
        (timeline(attempt("m0", 0), cached=32), "answer at m0 (32 tokens were cached)"),
        (
            timeline(attempt("d1", 1), attempt("d0", 0), engine="d1", fetch="p0"),
            "prompt at p0, answer at d1, after a try at d0",
        ),
        (
            timeline(
                attempt("d0", 0),
                attempt("d1", 1),
                engine="d1",
                cached=32,
                moments=(Moment(kind=MomentKind.RESUMED, at_s=1, node="d1", gap_s=1.5),),
            ),
            "answer at d1; resumed at d1 after its node was lost, with a pause of 1.50 s",
        ),
        (
            timeline(
                attempt("d0", 0),
                attempt("d1", 1),
                moments=(Moment(kind=MomentKind.MOVED, at_s=1, node="d1", gap_s=0.02),),
            ),
            "answer at d1; moved to d1, with a pause of 20 ms",
        ),
    ],
)
def test_the_nodes_are_those_of_the_timeline(found: Timeline, said: str) -> None:
    assert latency_line(answer(), found) == f"TTFT 250 ms, 2.25 s in all; {said}"
