"""Tests that bytes from a socket become chunks with their times, however cut, and an incomplete answer an error."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stream.raw_answer import RawAnswer, Wording, read_answer

WORDING = Wording(" a b", " end")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str, finish: str | None = None) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"text": text, "finish_reason": finish}]}) + b"\n\n"


def chunked(*events: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in events) + b"0\r\n\r\n"


ENDING = (event(" end"), event("", "length") + b"data: [DONE]\n\n")
WHOLE = chunked(event(" a"), event(" b a"), *ENDING)


def answer_of(*pieces: bytes) -> RawAnswer:
    raw = RawAnswer(0.0)
    for now, data in enumerate(pieces, start=1):
        raw.feed(float(now), data)
    return raw


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_any_cut_gives_the_same_words(cuts: list[int]) -> None:
    edges = sorted({0, *cuts, len(WHOLE)})
    raw = RawAnswer(0.0)
    firsts = 0
    for start, end in itertools.pairwise(edges):
        assert not raw.ended
        firsts += raw.feed(float(end), WHOLE[start:end])
    assert raw.ended
    found = read_answer(raw, WORDING)
    assert found.times.error == ""
    assert found.words == [1, 2, 1]
    assert found.times.output_tokens == 4
    assert firsts <= 1


def test_times_are_those_of_the_pieces() -> None:
    head, first, second, rest = HEAD, *(chunked(part)[len(HEAD) : -5] for part in (event(" a"), event(" b"))), b""
    last = chunked(*ENDING)[len(HEAD) :]
    raw = answer_of(head, first, second + last)
    found = read_answer(raw, WORDING)
    assert (found.times.error, rest) == ("", b"")
    assert found.times.arrivals == [2.0, 3.0, 3.0]
    assert found.times.ended == 3.0


def test_words_of_the_last_piece_are_counted_as_it_comes() -> None:
    raw = RawAnswer(0.0)
    first = chunked(event(" a"))[:-5]
    assert raw.feed(1.0, first)
    assert raw.last_words == 1
    assert not raw.feed(2.0, chunked(event(" b a"), event(" b"))[len(HEAD) : -5])
    assert raw.last_words == 3


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (chunked(event(" a"), event(" a"), *ENDING), "another text came"),
        (chunked(event(" a"), event(" b")), "broke off after 2 words"),
        (chunked(event(" a"), event(" end")), "did not end as it should"),
        (chunked(event(" a"), event(" end"), event("", "stop") + b"data: [DONE]\n\n"), "with stop"),
        (HEAD, "no answer came"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull", "status 503: full"),
        (b"gibberish\r\n\r\n", "not a stream of events"),
        (chunked(b"data: {\n\n"), "not a stream of events"),
    ],
)
def test_anything_else_is_an_error(wire: bytes, error: str) -> None:
    assert error in read_answer(answer_of(wire, b""), WORDING).times.error
