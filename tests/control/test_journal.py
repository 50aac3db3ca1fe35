"""The journal of a streamed answer: entries are cut off whole, and say which tokens a client has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.journal import (
    DONE_ENTRY,
    USAGE_ENTRY,
    Journal,
    JournaledChoice,
    JournalError,
    cut,
    cut_move_blocks,
    cut_move_lines,
    digest,
    entry,
    entry_with_logprobs,
    move_block,
    move_line,
    parse,
)
from pdserve.wire.sampling_params import TokenLogprobs

TOKENS = st.lists(st.integers(0, 99), max_size=4)
TEXTS = st.text(alphabet=':ab \n."', max_size=8)


def event(text: str) -> bytes:
    """Returns an event whose text is encoded as JSON encodes it: without a line break."""
    return b"data: " + text.replace("\n", "\\n").encode() + b"\n\n"


def test_an_entry_names_a_choice_its_tokens_and_its_end() -> None:
    assert entry(0, [5]) == b":0 5\n"
    assert entry(12, [5, 0, 7], over=True) == b":12 5 0 7.\n"
    assert entry(3, [], over=True) == b":3.\n"


@given(st.lists(st.tuples(TEXTS, st.one_of(st.none(), st.tuples(st.integers(0, 3), TOKENS)))))
def test_what_is_cut_off_are_the_entries_and_nothing_else(
    events: list[tuple[str, tuple[int, list[int]] | None]],
) -> None:
    stream = b"".join((b"" if about is None else entry(*about)) + event(text) for text, about in events)
    shown, entries = cut(stream)
    assert shown == b"".join(event(text) for text, _ in events)
    assert entries == b"".join(entry(*about)[1:] for _, about in events if about is not None)


@pytest.mark.parametrize(
    ("data", "blocks", "lines"),
    [
        (b"", (b"", 0), (b"", 0)),
        (move_block(7), (b"", 7), (b"\n", 7)),
        (move_line(7), (b":move 7\n", 0), (b"", 7)),
        (b":0 1\n:move 8\n:1 2\n", (b":0 1\n:move 8\n:1 2\n", 0), (b":0 1\n:1 2\n", 8)),
        (event("a") + move_block(1) + move_block(2) + event("b"), (event("a") + event("b"), 2), None),
        (event("a:move 5"), (event("a:move 5"), 0), (event("a:move 5"), 0)),
        (b":move -1\n\n", (b":move -1\n\n", 0), (b":move -1\n\n", 0)),
        (b":move " + b"9" * 13 + b"\n\n", (b":move " + b"9" * 13 + b"\n\n", 0), None),
    ],
)
def test_wishes_for_room_are_cut_off_where_they_stand_alone(
    data: bytes, blocks: tuple[bytes, int], lines: tuple[bytes, int] | None
) -> None:
    assert cut_move_blocks(data) == blocks
    if lines is not None:
        assert cut_move_lines(data) == lines


def test_no_wish_is_no_line() -> None:
    assert move_line(0) == b""


def test_a_journal_adds_up_what_its_entries_say() -> None:
    lines = [entry(0, [1, 2]), entry(1, [3]), entry(0, [4], over=True), USAGE_ENTRY, DONE_ENTRY]
    journal = parse(b"".join(line[1:] for line in lines), choices=3, vocab_size=10)
    choices = {0: JournaledChoice([1, 2, 4], over=True, groups=[2, 1]), 1: JournaledChoice([3], groups=[1])}
    assert journal == Journal(choices, usage=True, done=True, events=5)
    assert parse(b"", choices=1, vocab_size=1) == Journal()


def test_a_journal_knows_how_much_of_the_last_group_there_is() -> None:
    """Entries without tokens belong to the group of the last one that has some."""
    for entries, tokens, empty in ((b"0\n", [], 1), (b"0 1\n0 2 3\n", [2, 3], 0), (b"0 1\n0 2 3\n0\n0\n", [2, 3], 2)):
        choice = parse(entries, choices=1, vocab_size=10).choices[0]
        assert (choice.last_group, choice.empty_since) == (tokens, empty)


LOGPROBS = st.floats(-9999.0, 0.0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 99),
            st.builds(TokenLogprobs, LOGPROBS, st.integers(1, 99), st.tuples(st.tuples(st.integers(0, 99), LOGPROBS))),
        ),
        min_size=1,
    )
)
def test_log_probabilities_come_back_as_they_were(tokens: list[tuple[int, TokenLogprobs]]) -> None:
    token_ids, logprobs = [token_id for token_id, _ in tokens], [each for _, each in tokens]
    line = entry_with_logprobs(0, token_ids, logprobs)
    assert not set(line[1:]) & set(b"{:")
    choice = parse(line[1:], 1, 100).choices[0]
    assert (choice.token_ids, choice.logprobs) == (token_ids, logprobs)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (b"0 1", "has no end"),
        (b"0 1\nhello\n", "entry 1 of the journal is none: b'hello'"),
        (b"0 -1\n", "is none"),
        (b"0  1\n", "is none"),
        (b"00 1\n", "is none"),
        (b"0 10\n", "names choice 0 and tokens that the request lacks"),
        (b"2 1\n", "names choice 2"),
        (b"0 1.\n0 2\n", "goes on with choice 0, which is over"),
        (b"0 1 [[-0.5]]\n", "has no log probabilities where they should be"),
        (b"0 1 [" + b"[" * 100_000 + b"]\n", "has no log probabilities where they should be"),
        (b"0 1 [[1e999,1,[]]]\n", "has no log probabilities where they should be"),
        (b"0 1 [[-0.5,1,[]],[-0.5,1,[]]]\n", "of other tokens"),
        (b"0 1 [[-0.5,1,[[10,-1]]]]\n", "of other tokens"),
        (b"0 1\n0 2 [[-0.5,1,[]]]\n", "of some tokens, and not of all"),
        (b"0 1 [[-0.5,1,[]]]\n0 2\n", "of some tokens, and not of all"),
        (b"0 1 [] 2\n", "is none"),
    ],
)
def test_what_is_no_journal_is_refused_with_its_place(entries: bytes, why: str) -> None:
    with pytest.raises(JournalError, match=why):
        parse(entries, choices=2, vocab_size=10)


def test_another_journal_has_another_digest() -> None:
    assert len(digest(b"")) == 32
    assert digest(b"0 1\n") != digest(b"0 2\n")
