"""The decode side's session, in every order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.ids import TransferId
from pdserve.wire.sampling import SampledToken
from pdserve.wire.ticket import PrefillTarget
from pdserve.wire.transfer import Cancel, Digests, Done, Failed, FirstToken, PrefillRequest
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
)
from pdserve_kvtransfer.fetch import FetchEffect, FetchSession, FetchState
from tests.kvtransfer.rig import SAMPLING

TRANSFER = TransferId(b"r" * 16, 0, b"d" * 16)
SIZE = 100
BLOCK_IDS = (7, 3, 9, 4)
FIRST = 2
DEADLINE_S = 5.0


def session(*, checked: bool = False) -> FetchSession:
    order = FetchOrder(
        transfer_id=TRANSFER,
        target=PrefillTarget("p", "tcp://p:1", b"p" * 16),
        token_ids=list(range(6 * 16)),
        first_block=FIRST,
        block_ids=BLOCK_IDS,
        sampling=SAMPLING,
        deadline_s=DEADLINE_S,
    )
    return FetchSession(order, tag=11, block_bytes=SIZE, now=0.0, checked=checked)


def moving(*, checked: bool = False) -> FetchSession:
    made = session(checked=checked)
    made.request(0.0)
    return made


def land(fetch: FetchSession, *indexes: int) -> list[FetchEffect]:
    effects: list[FetchEffect] = []
    for index in indexes:
        assert fetch.accept(index, SIZE) is not None
        effects += fetch.landed(index, index * 1000, 1.0)
    return effects


def test_the_request_carries_what_is_left_of_the_deadline() -> None:
    (request,) = session().request(2.0)
    assert isinstance(request, PrefillRequest)
    assert (request.transfer_id, request.tag, request.first_block, request.deadline_s) == (TRANSFER, 11, FIRST, 3.0)


def test_each_index_has_its_block() -> None:
    fetch = moving()
    assert [fetch.accept(FIRST + i, SIZE) for i in (2, 0, 3, 1)] == [9, 7, 4, 3]


@pytest.mark.parametrize(("index", "length"), [(1, SIZE), (6, SIZE), (2, SIZE - 1), (2, SIZE + 1), (2, 0)])
def test_what_does_not_fit_is_not_accepted(index: int, length: int) -> None:
    assert moving().accept(index, length) is None


def test_nothing_is_accepted_before_it_was_asked_for() -> None:
    assert session().accept(FIRST, SIZE) is None


def test_the_token_may_come_last() -> None:
    fetch = moving()
    assert land(fetch, 2, 3, 4, 5) == []
    assert fetch.on_first_token(FirstToken(TRANSFER, (SampledToken(8),), 16), 2.0) == [
        FirstTokenArrived(TRANSFER, (SampledToken(8),), 16),
        Done(TRANSFER),
        FetchLanded(TRANSFER, 2.0, 4 * SIZE),
    ]


def test_the_token_may_come_first_and_counts_once() -> None:
    fetch = moving()
    assert fetch.on_first_token(FirstToken(TRANSFER, (SampledToken(8),), 0), 0.5) == [
        FirstTokenArrived(TRANSFER, (SampledToken(8),), 0)
    ]
    assert fetch.on_first_token(FirstToken(TRANSFER, (SampledToken(9),), 0), 0.6) == []
    assert land(fetch, 5, 4, 3, 2) == [Done(TRANSFER), FetchLanded(TRANSFER, 1.0, 4 * SIZE)]


def test_a_failure_counts_leading_blocks_and_quarantines_the_rest() -> None:
    fetch = moving()
    land(fetch, 2, 4)
    fetch.accept(5, SIZE)
    assert fetch.on_failed(Failed(TRANSFER, "why")) == [FetchFailed(TRANSFER, "why", 1, (4,), FailureKind.REFUSED)]
    assert fetch.over and fetch.in_flight == 1
    assert fetch.landed(5, 0, 1.0) == [BlocksReleased((4,))]
    assert fetch.state is FetchState.ENDED


def test_a_cancel_is_told_only_to_those_who_know() -> None:
    assert session().cancel() == [FetchCancelled(TRANSFER, ())]
    assert moving().cancel() == [Cancel(TRANSFER), FetchCancelled(TRANSFER, ())]


def test_the_deadline() -> None:
    fetch = moving()
    assert fetch.expire(DEADLINE_S - 0.01) == []
    cancel, failed = fetch.expire(DEADLINE_S)
    assert cancel == Cancel(TRANSFER)
    assert isinstance(failed, FetchFailed) and failed.kind is FailureKind.DEADLINE
    assert fetch.expire(DEADLINE_S + 1) == []


def test_a_closed_link_leaves_no_quarantine() -> None:
    fetch = moving()
    fetch.accept(3, SIZE)
    assert fetch.lost(FailureKind.PEER_LOST, "gone") == [FetchFailed(TRANSFER, "gone", 0, (), FailureKind.PEER_LOST)]


ANNOUNCED = Digests(TRANSFER, FIRST, tuple(1000 * index for index in range(FIRST, FIRST + 4)))


@pytest.mark.parametrize("early", [True, False])
def test_a_checked_block_counts_when_it_is_what_was_announced(early: bool) -> None:
    fetch = moving(checked=True)
    fetch.on_first_token(FirstToken(TRANSFER, (SampledToken(8),), 0), 0.5)
    end = [Done(TRANSFER), FetchLanded(TRANSFER, 1.0, 4 * SIZE)]
    if early:
        assert fetch.on_digests(ANNOUNCED, 0.5) == []
        assert land(fetch, 2, 3, 4, 5) == end
    else:
        assert land(fetch, 2, 3, 4, 5) == []
        assert fetch.on_digests(ANNOUNCED, 1.0) == end


def test_a_block_that_is_something_else_ends_the_transfer() -> None:
    fetch = moving(checked=True)
    fetch.on_digests(ANNOUNCED, 0.5)
    land(fetch, 2)
    fetch.accept(3, SIZE)
    fetch.accept(4, SIZE)
    cancel, failed = fetch.landed(3, 7, 1.0)
    assert cancel == Cancel(TRANSFER)
    assert failed == FetchFailed(TRANSFER, "block 3 is not what was sent", 1, (9,), FailureKind.CORRUPT)
    assert fetch.landed(4, 0, 1.0) == [BlocksReleased((9,))]


@pytest.mark.parametrize(
    "wrong", [Digests(TRANSFER, 1, (0,)), Digests(TRANSFER, 5, (5000, 1)), Digests(TRANSFER, 2, (1,))]
)
def test_digests_that_contradict_the_request_or_each_other_end_the_transfer(wrong: Digests) -> None:
    fetch = moving(checked=True)
    assert fetch.on_digests(ANNOUNCED, 0.5) == []
    assert fetch.on_digests(ANNOUNCED, 0.5) == [], "saying the same twice changes nothing"
    assert [type(effect) for effect in fetch.on_digests(wrong, 0.5)] == [Cancel, FetchFailed]


@dataclass
class Story:
    """One session, and what may be true of it."""

    fetch: FetchSession
    checked: bool
    announced: set[int] = field(default_factory=set)
    good: bool = True
    accepted: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    destinations: list[int] = field(default_factory=list)
    effects: list[FetchEffect] = field(default_factory=list)
    quarantined: set[int] = field(default_factory=set)
    over: bool = False

    def note(self, effects: list[FetchEffect]) -> None:
        for effect in effects:
            if isinstance(effect, FetchLanded | FetchFailed | FetchCancelled):
                assert not self.over, "two ends"
                self.over = True
                self._check_end(effect)
            elif isinstance(effect, BlocksReleased):
                assert self.over and set(effect.block_ids) <= self.quarantined
                self.quarantined -= set(effect.block_ids)
            else:
                assert not self.over, f"{effect} after the end"
            self.effects.append(effect)

    def _check_end(self, end: FetchLanded | FetchFailed | FetchCancelled) -> None:
        if isinstance(end, FetchLanded):
            assert self.counted == set(range(FIRST, FIRST + len(BLOCK_IDS))) and self.good
            assert end.bytes == len(BLOCK_IDS) * SIZE
            return
        assert set(end.quarantined) in ({BLOCK_IDS[i - FIRST] for i in self.accepted}, set())
        self.quarantined = set(end.quarantined)
        if isinstance(end, FetchFailed):
            leading = 0
            while leading + FIRST in self.counted:
                leading += 1
            assert end.landed == leading or (not self.good and end.landed <= leading)

    @property
    def counted(self) -> set[int]:
        return self.landed & self.announced if self.checked else self.landed

    def act(self, act: str, number: int, now: float) -> None:
        fetch = self.fetch
        match act:
            case "request":
                self.note(fetch.request(now))
            case "accept":
                was_over = fetch.over
                destination = fetch.accept(number, SIZE)
                if destination is not None:
                    assert not was_over
                    self.destinations.append(destination)
                    self.accepted.add(number)
            case "land" if self.accepted:
                index = sorted(self.accepted)[number % len(self.accepted)]
                self.accepted.discard(index)
                self.landed.add(index)
                self.note(fetch.landed(index, 0, now))
            case "announce" if self.fetch.state is FetchState.MOVING:
                index, right = FIRST + number % len(BLOCK_IDS), number < 7
                self.good &= right
                if right:
                    self.announced.add(index)
                self.note(self.fetch.on_digests(Digests(TRANSFER, index, (0 if right else 1,)), now))
            case "token":
                self.note(fetch.on_first_token(FirstToken(TRANSFER, (SampledToken(number),), 0), now))
            case "failed":
                self.note(fetch.on_failed(Failed(TRANSFER, "no")))
            case "cancel":
                self.note(fetch.cancel())
            case "expire":
                self.note(fetch.expire(now))
            case "withdraw":
                self.note(fetch.withdraw(FailureKind.CLOSED, "closing"))

    def lose(self) -> None:
        self.note(self.fetch.lost(FailureKind.PEER_LOST, "gone"))


COMMON = st.sampled_from(["request", "accept", "accept", "land", "land", "announce", "announce", "token"])
ENDS = st.sampled_from(["failed", "cancel", "expire", "withdraw"])
STEPS = st.lists(
    st.tuples(st.one_of(COMMON, COMMON, COMMON, ENDS), st.integers(0, 7), st.floats(0, 0.4)), min_size=1, max_size=40
)


@given(st.booleans(), STEPS)
def test_every_order_of_events_has_one_end(checked: bool, steps: list[tuple[str, int, float]]) -> None:
    story, now = Story(session(checked=checked), checked), 0.0
    for act, number, pause in steps:
        now += pause
        story.act(act, number, now)
    story.lose()
    assert story.over and not story.quarantined
    assert story.fetch.state is FetchState.ENDED
    assert len(set(story.destinations)) == len(story.destinations), "a block was accepted twice"
    said = [type(effect) for effect in story.effects]
    assert said.count(PrefillRequest) <= 1
    assert said.count(Done) + said.count(Cancel) <= said.count(PrefillRequest)
    assert said.count(Done) == said.count(FetchLanded)
    assert said.count(FirstTokenArrived) <= 1
