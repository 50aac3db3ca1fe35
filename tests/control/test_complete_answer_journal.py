"""A journaled answer in one piece is read the same however it is cut, and nothing else passes for one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.journal import MAX_LINE_BYTES, AnswerError, AnswerHead, AnswerReader, entry, entry_with_logprobs
from pdserve.wire.sampling_params import TokenLogprobs

LOGPROBS = TokenLogprobs(-0.5, 1, ((2290, -0.5), (7, -1e-9)))
ENTRIES = entry(0, [314, 8]) + entry(1, [17]) + entry_with_logprobs(2, [2290], [LOGPROBS])
HEAD = AnswerHead(200, {"content-type": "application/json", "x-pdserve-ignored": "a,b"})
BODY = b'{"text": "{\\n:0 7"}\n\n:0 9\n'
DATA = ENTRIES + HEAD.encode() + BODY


@given(cuts=st.lists(st.integers(0, len(DATA))))
def test_however_it_is_cut(cuts: list[int]) -> None:
    reader, entries = AnswerReader(1000), b""
    for start, end in itertools.pairwise([0, *sorted(cuts), len(DATA)]):
        more = reader.feed(DATA[start:end])
        assert more == b"" or more.endswith(b"\n")
        entries += more
        assert (reader.head is None) == (end < len(DATA) - len(BODY))
    assert (entries, reader.head, reader.body()) == (ENTRIES, HEAD, BODY)


def test_an_answer_that_breaks_off_has_no_head() -> None:
    for end in range(len(ENTRIES) + len(HEAD.encode())):
        reader = AnswerReader(1000)
        reader.feed(DATA[:end])
        assert (reader.head, reader.body()) == (None, b"")


@pytest.mark.parametrize(
    "data",
    [
        b"data: x\n",
        b"\n",
        b':0 1{"status":200,"headers":{}}\n',
        b'{"status":200}\n',
        b'{"status":99,"headers":{}}\n',
        b'{"status":200,"headers":{"a":"b\\r\\nc: d"}}\n',
        b'{"status":200,"headers":{"a":"b\\n"}}\n',
        b'{"status":200,"headers":{},"more":1}\n',
        b"{\xff}\n",
        b":" + b"0" * MAX_LINE_BYTES,
        b"{" * (MAX_LINE_BYTES + 1),
    ],
)
def test_what_is_no_such_answer(data: bytes) -> None:
    with pytest.raises(AnswerError):
        AnswerReader(1000).feed(data)


def test_the_largest_answer() -> None:
    reader = AnswerReader(len(BODY))
    reader.feed(DATA)
    reader.feed(b"")
    with pytest.raises(AnswerError, match="above"):
        reader.feed(b"x")
