"""Entries go to the journal and events to the client, however the network cuts them; and journals share a budget."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.control import journal as wire
from pdserve.control.journal import DONE_ENTRY, USAGE_ENTRY, Journal, cut, entry
from pdserve_proxy.continuation.journal import (
    GROWTH_BYTES,
    DropReason,
    JournalBudget,
    RelayJournal,
)
from pdserve_proxy.relay.dispatch import NodeRequest
from pdserve_proxy.relay.event_stream import MAX_EVENT_BYTES, JournaledEvents
from pdserve_proxy.requests.request_body import read_body
from tests.cpu_time import least_cpu_s
from tests.examples import examples
from tests.proxy.journaling_nodes import ANSWER
from tests.terms import made_terms

REQUEST = NodeRequest("/v1/completions", read_body(b'{"model": "m", "prompt": "p"}'), None, made_terms())
TOKEN = entry(0, [314]) + b'data: {"text": "a: b"}\n\n'
MOST_EVENTS = 8
EVENTS = st.lists(
    st.sampled_from(
        [
            TOKEN,
            entry(12, [3, 4, 5]) + b'data: {"text": ": x\\n"}\n\n',
            entry(1, [], over=True) + b"data: {}\n\n",
            entry(0, [1]) + b"event: x\ndata: a\ndata: :b\n\n",
            USAGE_ENTRY + b"data: {}\n\n",
            DONE_ENTRY + b"data: [DONE]\n\n",
        ]
    ),
    max_size=MOST_EVENTS,
)


def new_journal(limit: int = 2**20) -> RelayJournal:
    return RelayJournal(JournalBudget(limit, limit), REQUEST)


@given(events=EVENTS, cuts=st.lists(st.integers(0, 200)))
def test_events_and_entries_are_parted_however_they_are_cut(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events)
    journal = new_journal()
    stream, out = JournaledEvents(journal), b""
    edges = sorted({min(at, len(data)) for at in cuts} | {0, len(data)})
    for start, end in itertools.pairwise(edges):
        out += stream.feed(data[start:end])
        whole = [event for number, event in enumerate(events) if len(b"".join(events[: number + 1])) <= end]
        # The client has an event exactly if the journal has its entry.
        assert (out, journal.lines() if journal.entries else b"") == cut(b"".join(whole))
    assert journal.resumable == bool(events)
    assert journal.done == (bool(events) and events[-1].startswith(DONE_ENTRY))


@given(events=EVENTS, places=st.lists(st.integers(0, MOST_EVENTS)), cuts=st.data())
def test_wishes_between_events_are_told_and_leave_no_trace(
    events: list[bytes], places: list[int], cuts: st.DataObject
) -> None:
    """The proxy hears the last of the wishes that come at once."""
    pieces = [*events]
    for number, place in enumerate(sorted(places, reverse=True)):
        pieces.insert(min(place, len(events)), wire.move_block(len(places) - number))
    data, journal, told = b"".join(pieces), new_journal(), list[int]()
    journal.on_blocks_wanted = told.append
    stream, out = JournaledEvents(journal), b""
    edges = sorted({0, *cuts.draw(st.lists(st.integers(0, len(data)))), len(data)})
    for start, end in itertools.pairwise(edges):
        out += stream.feed(data[start:end])
    assert (out, journal.lines() if journal.entries else b"") == cut(b"".join(events))
    assert journal.resumable == bool(events)
    assert told == sorted(set(told))
    assert told[-1:] == [len(places)] * bool(places)


@given(
    events=st.lists(st.sampled_from([TOKEN, TOKEN * 3, b"data: no entry\n\n", b"event: error\ndata: {}\n\n"])),
    cuts=st.lists(st.integers(0, 200)),
)
def test_a_journal_is_dropped_when_an_event_has_no_entry(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events)
    journal = new_journal()
    stream, out = JournaledEvents(journal), b""
    edges = sorted({min(at, len(data)) for at in cuts} | {0, len(data)})
    for start, end in itertools.pairwise(edges):
        out += stream.feed(data[start:end])
    assert out == cut(data)[0]
    assert journal.resumable == (bool(events) and all(event.startswith(b":") for event in events))


@settings(max_examples=examples(20))
@given(cuts=st.lists(st.integers(-12, 12)), around=st.sampled_from([0, MAX_EVENT_BYTES]))
def test_an_event_too_large_to_be_held_back_drops_the_journal_and_shows_no_entry(cuts: list[int], around: int) -> None:
    huge = entry(0, [1]) + b"data: " + b"x" * MAX_EVENT_BYTES + b"\n\n"
    data = TOKEN + huge + TOKEN * 2
    journal = new_journal()
    stream, out = JournaledEvents(journal), b""
    middle = len(TOKEN) + (around or len(huge))
    for start, end in itertools.pairwise(sorted({0, *(middle + at for at in cuts), len(data)})):
        out += stream.feed(data[start:end])
        if out != cut(TOKEN)[0] and not out.endswith(b"\n\n"):
            assert not journal.resumable
    assert out + stream.rest() == cut(data)[0]


def test_a_huge_event_is_counted_and_its_rest_too_when_the_stream_ends_with_it() -> None:
    budget = JournalBudget(2**20, 2**20)
    journal = RelayJournal(budget, REQUEST)
    stream = JournaledEvents(journal)
    begin = entry(0, [1]) + b"data: " + b"x" * MAX_EVENT_BYTES
    assert stream.feed(TOKEN + begin) == cut(TOKEN + begin)[0]
    assert budget.dropped == {DropReason.BUDGET: 0, DropReason.EVENT: 1}
    assert stream.feed(b":0 1\n") == b""
    assert stream.rest() == b":0 1\n"
    assert stream.feed(b"\n" + TOKEN) == b"\n" + cut(TOKEN)[0]
    assert (journal.resumable, budget.taken_bytes, len(journal.entries)) == (False, 0, 0)
    assert budget.dropped[DropReason.EVENT] == 1


def test_the_events_of_a_dropped_journal_are_counted_on() -> None:
    """An error event of a stream whose events have numbers has the next one."""
    journal = RelayJournal(JournalBudget(2**20, 2**20), REQUEST)
    stream = JournaledEvents(journal)
    stream.feed(TOKEN * 3)
    journal.drop(DropReason.BUDGET)
    stream.feed(TOKEN * 2)
    assert (journal.count, len(journal.entries)) == (5, 0)


@pytest.mark.parametrize("end", range(len(ANSWER) + 1))
def test_a_client_has_all_exactly_if_it_has_the_end(end: int) -> None:
    journal = new_journal()
    JournaledEvents(journal).feed(b"".join(ANSWER[:end]))
    assert journal.done == (end == len(ANSWER))


@pytest.mark.parametrize("pieces", [1, len(ANSWER)])
@pytest.mark.parametrize("start", range(6))
def test_what_has_come_since_can_be_read(start: int, pieces: int) -> None:
    journal = new_journal()
    stream = JournaledEvents(journal)
    for event in ANSWER[:start]:
        stream.feed(event)
    before = len(journal.entries)
    rest = ANSWER[start:] if pieces > 1 else [b"".join(ANSWER[start:])]
    for event in rest:
        stream.feed(event)
    tokens = [*range(100 + start, 105), 7]
    later = journal.read_from(before)
    assert (later.choices[0].token_ids, later.choices[0].over) == (tokens, True)
    assert (later.usage, later.done) == (True, True)
    assert journal.read_from(len(journal.entries)) == Journal()


def test_journals_share_the_budget_and_give_all_of_it_back() -> None:
    budget = JournalBudget(4 * GROWTH_BYTES, 4 * GROWTH_BYTES)
    journals = [RelayJournal(budget, REQUEST), RelayJournal(budget, REQUEST)]
    streams = [JournaledEvents(journal) for journal in journals]
    assert budget.taken_bytes == 0
    while all(journal.request for journal in journals):
        for stream in streams:
            assert stream.feed(TOKEN) == cut(TOKEN)[0]
        assert sum(len(journal.entries) for journal in journals) <= budget.taken_bytes <= 4 * GROWTH_BYTES
    assert sorted(journal.resumable for journal in journals) == [False, True]
    assert budget.dropped == {DropReason.BUDGET: 1, DropReason.EVENT: 0}
    for stream, journal in zip(streams, journals, strict=True):
        assert stream.feed(TOKEN) == cut(TOKEN)[0]  # both streams go on
        assert bool(journal.entries) == journal.resumable
        journal.free()
        journal.free()
    assert budget.taken_bytes == 0
    assert budget.dropped[DropReason.BUDGET] == 1


def test_one_journal_takes_only_its_part_of_the_budget() -> None:
    budget = JournalBudget(64 * GROWTH_BYTES, 3 * GROWTH_BYTES)
    journal = RelayJournal(budget, REQUEST)
    stream, most = JournaledEvents(journal), 0
    while not stream.feed(TOKEN) or journal.resumable:
        most = max(most, budget.taken_bytes)
    assert GROWTH_BYTES < most <= 3 * GROWTH_BYTES
    assert (budget.taken_bytes, budget.dropped[DropReason.BUDGET]) == (0, 1)


def test_a_journal_is_never_larger_than_a_ticket_can_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_proxy.continuation.journal.MAX_JOURNAL_BYTES", 2 * GROWTH_BYTES)
    journal = new_journal()
    stream = JournaledEvents(journal)
    most = 0
    while not stream.feed(TOKEN) or journal.resumable:
        most = max(most, len(journal.entries))
    assert GROWTH_BYTES < most <= 3 * GROWTH_BYTES
    assert most <= wire.MAX_JOURNAL_BYTES


def test_the_work_for_a_journal_grows_as_its_size_does() -> None:
    def feed(count: int) -> None:
        stream = JournaledEvents(new_journal(2**30))
        for _ in range(count):
            stream.feed(TOKEN)

    few, many = (least_cpu_s(functools.partial(feed, count)) for count in (2_000, 16_000))
    assert many < few * 24, "8 times as much; 64 times if the whole journal is copied for each event"
