"""A relay passes whole events on, however the network cuts them."""

from __future__ import annotations

import functools
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_proxy.relay.event_stream import MAX_EVENT_BYTES, CompleteEvents
from tests.cpu_time import least_cpu_s
from tests.examples import examples

ENDINGS = (b"\n\n", b"\r\n\r\n")
EVENTS = st.lists(
    st.sampled_from([b"data: {}\n\n", b": ping\n\n", b"data: a\r\n\r\n", b"data: a\ndata: b\n\n", b"\n\n"])
)


@given(events=EVENTS, cuts=st.lists(st.integers(0, 80)))
def test_nothing_is_lost_and_every_piece_ends_with_an_event(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events)
    relay, out = CompleteEvents(), b""
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    for start, end in itertools.pairwise(edges):
        piece = relay.feed(data[start:end])
        assert piece == b"" or piece.endswith(ENDINGS)
        waiting = data[len(out) : end]
        assert len(piece) == max(waiting.rfind(to) + len(to) if to in waiting else 0 for to in ENDINGS)
        out += piece
    assert out + relay.rest() == data


def test_a_whole_piece_goes_through_as_it_came() -> None:
    piece = b"data: 1\n\ndata: 2\n\n"
    assert CompleteEvents().feed(piece) is piece


def test_half_an_event_is_given_up_when_the_stream_breaks() -> None:
    relay = CompleteEvents()
    assert relay.feed(b"data: 1\n\ndata: {half") == b"data: 1\n\n"
    assert relay.close_broken() == b""
    assert relay.rest() == b""


def test_a_stream_that_ends_without_a_blank_line_is_passed_on() -> None:
    relay = CompleteEvents()
    relay.feed(b"data: last")
    assert relay.rest() == b"data: last"


def test_a_huge_event_is_not_held_back_and_an_error_can_still_follow_it() -> None:
    relay = CompleteEvents()
    huge = b"data: " + b"x" * MAX_EVENT_BYTES
    assert relay.feed(huge) == huge
    assert relay.close_broken() == b"\n\n"
    assert relay.feed(b"end\n\n") == b"end\n\n"
    assert relay.close_broken() == b""


def test_an_event_without_end_is_held_back_up_to_a_bound_only() -> None:
    relay, given = CompleteEvents(), 0
    piece = b"x" * 1000
    for number in range(64 * 1024):
        given += len(relay.feed(piece))
        assert (number + 1) * len(piece) - given <= MAX_EVENT_BYTES
    assert relay.close_broken() == b"\n\n"


@given(size=st.integers(MAX_EVENT_BYTES, MAX_EVENT_BYTES + 4), cut=st.integers(1, 4))
@settings(max_examples=examples(20))
def test_the_end_of_a_huge_event_is_seen_wherever_it_is_cut(size: int, cut: int) -> None:
    relay = CompleteEvents()
    data = b"x" * size + b"\r\n\r\n"
    assert relay.feed(data[:-cut]) + relay.feed(data[-cut:]) == data
    assert relay.close_broken() == b""


def test_the_work_for_an_event_grows_as_its_size_does() -> None:
    def feed(pieces: int) -> None:
        events, piece = CompleteEvents(), b"x" * 32
        for _ in range(pieces):
            events.feed(piece)

    whole = MAX_EVENT_BYTES // 32
    few, many = (least_cpu_s(functools.partial(feed, pieces)) for pieces in (whole // 8, whole))
    assert many < few * 24, "8 times as much; 64 times if everything held back is looked at again"
