"""Tests that events come whole, however their bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench import streamed_answer as sse
from pdserve.bench.streamed_answer import EventReader
from pdserve.errors import BenchError

EVENTS = [b'{"a": 1}', "ä\u2028".encode(), b"[DONE]"]
WIRE = b": a comment\n\n" + b"".join(b"event: x\ndata: " + event + b"\n\n" for event in EVENTS)


@given(st.lists(st.integers(0, len(WIRE)), max_size=8), st.booleans())
def test_any_cut_gives_the_same_events(cuts: list[int], crlf: bool) -> None:
    edges = [0, *sorted(cuts), len(WIRE)]
    parts = [WIRE[start:end] for start, end in itertools.pairwise(edges)]
    reader = EventReader()
    wire = [part.replace(b"\n", b"\r\n") if crlf else part for part in parts]
    assert [event for part in wire for event in reader.feed(part)] == EVENTS


def test_carriage_return_and_newline_in_two_reads() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\r\n\r") == []
    assert reader.feed(b"\ndata: 2\r") == [b"1"]
    assert reader.feed(b"\n\r\n") == [b"2"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_MAX_EVENT", 10)
    with pytest.raises(BenchError, match="without the end"):
        EventReader().feed(b"data: " + b"x" * 20)
