"""Tests the decode side's session with every order of events, on one rank and on two."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.ids import TransferId
from pdserve.wire.rank import Expect, ExpectMore, Forget
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import (
    Accept,
    BlocksReady,
    CachedRequest,
    Cancel,
    Digests,
    Done,
    Failed,
    FirstToken,
    Held,
    PrefillRequest,
)
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    BlocksReleased,
    CachedFetchOrder,
    FailureKind,
    FetchCancelled,
    FetchEnd,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
)
from pdserve_kvtransfer.fetch.session import FetchEffect, FetchSession, FetchState
from pdserve_kvtransfer.pieces import group_maps
from tests.kvtransfer.rig import SAMPLING

TRANSFER = TransferId(b"r" * 16, 0, b"d" * 16)
SIZE = 100
BLOCK_IDS = (7, 3, 9, 4)
FIRST = 2
END = FIRST + len(BLOCK_IDS)
DEADLINE_S = 5.0
TAG, LINK = 11, 6
TOKEN = FirstToken(TRANSFER, (SampledToken(8),), 16)
ARRIVED = FirstTokenArrived(TRANSFER, (SampledToken(8),), 16)


def landed(tail_s: float = 0.0, tail_bytes: int = 0) -> list[FetchEffect]:
    return [Done(TRANSFER), FetchLanded(TRANSFER, 1.0, 4 * SIZE, tail_s, tail_bytes, 4)]


def session(*, checked: bool = False, block_ids: tuple[int, ...] = BLOCK_IDS, paced: int = 0) -> FetchSession:
    order = FetchOrder(
        transfer_id=TRANSFER,
        target=PrefillTarget("p", "tcp://p:1", b"p" * 16),
        token_ids=list(range(END * 16)),
        first_block=FIRST,
        block_ids=block_ids,
        sampling=SAMPLING,
        deadline_s=DEADLINE_S,
        paced_blocks=paced,
    )
    return FetchSession(order, TAG, LINK, bytes(order.num_blocks), (SIZE,), 0.0, checked=checked)


def moving(*, checked: bool = False, ranks: int = 1) -> FetchSession:
    made = session(checked=checked)
    made.prepare(group_maps((2,), 1, ranks), ranks)
    for rank in range(ranks):
        made.expecting(rank, 0.0)
    assert made.state is FetchState.MOVING
    return made


def land(fetch: FetchSession, *indexes: int, rank: int = 0) -> list[FetchEffect]:
    return fetch.landed(rank, indexes, [index * 1000 for index in indexes], 1.0)


def test_the_ranks_are_ready_before_anything_is_asked_for() -> None:
    fetch = session()
    assert fetch.prepare(group_maps((2,), 1, 2), 2) == [Expect(LINK, TAG, FIRST, BLOCK_IDS, False)]
    assert fetch.expecting(1, 1.0) == []
    assert fetch.expecting(1, 1.5) == []
    (request,) = fetch.expecting(0, 2.0)
    assert isinstance(request, PrefillRequest)
    assert (request.transfer_id, request.tag, request.first_block, request.deadline_s) == (TRANSFER, TAG, FIRST, 3.0)


def test_the_token_may_come_last() -> None:
    fetch = moving()
    assert land(fetch, 2, 3, 4, 5) == []
    assert fetch.on_first_token(TOKEN, 1.0) == [ARRIVED, *landed()]


def test_the_token_may_come_first_and_counts_once() -> None:
    fetch = moving()
    assert fetch.on_first_token(TOKEN, 0.5) == [ARRIVED]
    assert fetch.on_first_token(TOKEN, 0.6) == []
    assert land(fetch, 5, 4, 3, 2) == landed(0.5, 4 * SIZE)


def test_only_what_lands_after_the_token_is_the_tail() -> None:
    fetch = moving()
    land(fetch, 2, 3, 4)
    fetch.on_first_token(TOKEN, 0.25)
    assert land(fetch, 5) == landed(0.75, SIZE)


def test_it_has_landed_when_every_rank_has_all() -> None:
    fetch = moving(ranks=2)
    fetch.on_first_token(TOKEN, 0.5)
    assert land(fetch, 2, 3, 4, 5, rank=1) == []
    assert land(fetch, 2, 3, 3, 4, rank=0) == []
    assert land(fetch, 5, rank=0) == landed(0.5, 4 * SIZE)


def test_a_failure_counts_leading_blocks_and_quarantines_what_any_rank_still_writes() -> None:
    fetch = moving(ranks=2)
    land(fetch, 2, 3, rank=0)
    land(fetch, 2, 4, rank=1)
    assert fetch.on_failed(Failed(TRANSFER, "why")) == [Forget(LINK, TAG)]
    assert fetch.forgotten(0, (9,)) == []
    assert fetch.forgotten(1, (4, 9)) == [FetchFailed(TRANSFER, "why", 1, (9, 4), FailureKind.FAILED)]
    assert fetch.released(1, (9,)) == []
    assert fetch.released(0, (9,)) == [BlocksReleased((9,))]
    assert fetch.released(1, (4,)) == [BlocksReleased((4,))]
    assert fetch.state is FetchState.ENDED


def test_a_cancel_is_told_only_to_those_who_know() -> None:
    assert session().cancel() == [FetchCancelled(TRANSFER, ())]
    prepared = session()
    prepared.prepare(group_maps((2,), 1, 1), 1)
    assert prepared.cancel() == [Forget(LINK, TAG)]
    asked = moving()
    assert asked.cancel() == [Cancel(TRANSFER), Forget(LINK, TAG)]
    assert asked.forgotten(0, ()) == [FetchCancelled(TRANSFER, ())]


def test_a_rank_that_prepares_late_has_not_forgotten_a_cancelled_transfer() -> None:
    fetch = session()
    fetch.prepare(group_maps((2,), 1, 2), 2)
    assert fetch.expecting(0, 0.0) == []
    assert fetch.cancel() == [Forget(LINK, TAG)]
    assert fetch.expecting(1, 0.1) == []
    assert fetch.forgotten(0, ()) == []
    assert fetch.forgotten(1, ()) == [FetchCancelled(TRANSFER, ())]
    assert fetch.state is FetchState.ENDED


def test_the_deadline() -> None:
    fetch = moving()
    assert fetch.expire(DEADLINE_S - 0.01) == []
    assert fetch.expire(DEADLINE_S) == [Cancel(TRANSFER), Forget(LINK, TAG)]
    assert fetch.expire(DEADLINE_S + 1) == []
    (failed,) = fetch.forgotten(0, ())
    assert isinstance(failed, FetchFailed) and failed.kind is FailureKind.DEADLINE


def test_a_closed_link_leaves_no_quarantine() -> None:
    fetch = moving()
    assert fetch.closed(FailureKind.PEER_LOST, "gone") == [
        FetchFailed(TRANSFER, "gone", 0, (), FailureKind.PEER_LOST, asked=True)
    ]


def test_a_link_that_closes_meanwhile_does_not_change_why_it_ended() -> None:
    fetch = moving()
    fetch.cancel()
    assert fetch.closed(FailureKind.PEER_LOST, "gone") == [FetchCancelled(TRANSFER, ())]


ANNOUNCED = Digests(TRANSFER, 0, 0, FIRST, tuple(1000 * index for index in range(FIRST, END)))


@pytest.mark.parametrize("early", [True, False])
def test_a_checked_block_counts_when_it_is_what_was_announced(early: bool) -> None:
    fetch = moving(checked=True)
    fetch.on_first_token(TOKEN, 0.5)
    if early:
        assert fetch.on_digests(ANNOUNCED, 0.5) == []
        assert land(fetch, 2, 3, 4, 5) == landed(0.5, 4 * SIZE)
    else:
        assert land(fetch, 2, 3, 4, 5) == []
        assert fetch.on_digests(ANNOUNCED, 1.0) == landed(0.5, 4 * SIZE)


def test_a_block_that_is_something_else_ends_the_transfer() -> None:
    fetch = moving(checked=True)
    fetch.on_digests(ANNOUNCED, 0.5)
    land(fetch, 2)
    assert fetch.landed(0, (3,), (7,), 1.0) == [Cancel(TRANSFER), Forget(LINK, TAG)]
    reason = "piece 3 on rank 0 is not what was sent"
    assert fetch.forgotten(0, (9,)) == [FetchFailed(TRANSFER, reason, 1, (9,), FailureKind.CORRUPT)]


@pytest.mark.parametrize("wrong", [Digests(TRANSFER, 0, 0, 2, (1,)), Digests(TRANSFER, 1, 0, 2, (2000,))])
def test_digests_that_contradict_each_other_or_the_head_map_end_the_transfer(wrong: Digests) -> None:
    fetch = moving(checked=True)
    assert fetch.on_digests(ANNOUNCED, 0.5) == []
    assert fetch.on_digests(ANNOUNCED, 0.5) == [], "saying the same twice changes nothing"
    assert fetch.on_digests(wrong, 0.5) == [Cancel(TRANSFER), Forget(LINK, TAG)]


@dataclass
class Story:
    """One session over some ranks, and the state that the test expects of it."""

    ranks: int
    checked: bool
    fetch: FetchSession
    landed: set[tuple[int, int]] = field(default_factory=set)
    announced: set[tuple[int, int]] = field(default_factory=set)
    writing: dict[int, set[int]] = field(default_factory=dict)
    asked: bool = False
    good: bool = True
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
                assert self.over and effect.block_ids and set(effect.block_ids) <= self.quarantined
                assert not set(effect.block_ids) & self.still
                self.quarantined -= set(effect.block_ids)
            else:
                assert not self.over or isinstance(effect, Done), f"{effect} after the end"
            self.effects.append(effect)

    @property
    def still(self) -> set[int]:
        return set().union(*self.writing.values())

    @property
    def counted(self) -> set[tuple[int, int]]:
        return self.landed & self.announced if self.checked else self.landed

    def _check_end(self, end: FetchEnd) -> None:
        everything = {(rank, index) for rank in range(self.ranks) for index in range(FIRST, END)}
        if isinstance(end, FetchLanded):
            assert self.counted == everything and self.good
            return
        assert set(end.quarantined) == self.still
        self.quarantined = set(end.quarantined)
        if isinstance(end, FetchFailed):
            assert all((rank, FIRST + i) in self.counted for rank in range(self.ranks) for i in range(end.landed))

    def act(self, act: str, number: int, now: float) -> None:
        fetch, rank, index = self.fetch, number % self.ranks, FIRST + number // self.ranks % len(BLOCK_IDS)
        match act:
            case "prepare":
                self.note(fetch.prepare(group_maps((2,), 1, self.ranks), self.ranks))
            case "expecting":
                self.note(fetch.expecting(rank, now))
            case "land":
                # A report may be late: blocks that came before the rank was told to forget are still reported as
                # landed.
                if fetch.state is FetchState.MOVING:
                    self.landed.add((rank, index))
                self.note(fetch.landed(rank, (index,), (0,) if self.checked else (), now))
            case "announce":
                right = number < 30
                if fetch.state is FetchState.MOVING:
                    self.good &= right
                    if right:
                        self.announced.add((rank, index))
                self.note(fetch.on_digests(Digests(TRANSFER, 0, rank, index, (0 if right else 1,)), now))
            case "token":
                self.note(fetch.on_first_token(TOKEN, now))
            case "failed":
                self.note(fetch.on_failed(Failed(TRANSFER, "no")))
            case "cancel":
                self.note(fetch.cancel())
            case "expire":
                self.note(fetch.expire(now))
            case "withdraw":
                self.note(fetch.withdraw(FailureKind.CLOSED, "closing"))
            case "forgotten" if fetch.state is FetchState.FORGETTING:
                written = set(BLOCK_IDS[: number % 3])
                self.writing.setdefault(rank, written)
                self.note(fetch.forgotten(rank, tuple(written)))
            case "released" if self.writing.get(rank) and not self.closed:
                # Another rank may not have reported yet which blocks are still written.
                block = self.writing[rank].pop()
                self.note(fetch.released(rank, (block,)))

    @property
    def closed(self) -> bool:
        return self.fetch.state is FetchState.ENDED

    def close(self) -> None:
        self.writing.clear()
        self.note(self.fetch.closed(FailureKind.PEER_LOST, "gone"))


COMMON = st.sampled_from(["prepare", "expecting", "land", "land", "land", "announce", "announce", "token"])
ENDS = st.sampled_from(["failed", "cancel", "expire", "withdraw", "forgotten", "forgotten", "released"])
STEPS = st.lists(
    st.tuples(st.one_of(COMMON, COMMON, COMMON, ENDS), st.integers(0, 31), st.floats(0, 0.3)), min_size=1, max_size=60
)


@given(st.sampled_from([1, 2]), st.booleans(), STEPS)
def test_every_order_of_events_has_one_end(ranks: int, checked: bool, steps: list[tuple[str, int, float]]) -> None:
    story, now = Story(ranks, checked, session(checked=checked)), 0.0
    for act, number, pause in steps:
        now += pause
        story.act(act, number, now)
    story.close()
    assert story.over and not story.quarantined
    assert story.fetch.state is FetchState.ENDED
    said = [type(effect) for effect in story.effects]
    assert said.count(PrefillRequest) <= 1
    assert said.count(Done) + said.count(Cancel) <= said.count(PrefillRequest)
    assert said.count(Done) == said.count(FetchLanded)
    assert said.count(Forget) + said.count(Done) <= said.count(Expect)
    assert said.count(FirstTokenArrived) <= 1


@given(st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_news_of_late_ranks_come_twice_and_in_any_order_around_an_end(
    ranks: int, checked: bool, data: st.DataObject
) -> None:
    """Anything may be reported about a transfer, with an end somewhere. Reports after the end have no effect."""
    pieces = range(ranks * len(BLOCK_IDS))
    news = [("land", number) for number in pieces] + [("token", 0)]
    news += [("announce", number) for number in pieces] if checked else []
    said = data.draw(st.permutations(news + data.draw(st.lists(st.sampled_from(news), max_size=4))))
    at = data.draw(st.integers(0, len(said)))
    end = data.draw(st.sampled_from(["failed", "cancel", "withdraw"]))
    after = [("forgotten", number) for number in range(ranks)] * 2 + [
        ("released", number) for number in range(ranks)
    ] * 2
    late = data.draw(st.permutations(said[at:] + after))

    story = Story(ranks, checked, session(checked=checked))
    for act, number in [("prepare", 0), *(("expecting", rank) for rank in range(ranks)), *said[:at]]:
        story.act(act, number, 1.0)
    complete = set(news) <= set(said[:at])
    assert story.over is complete
    for act, number in [(end, 0), *late]:
        story.act(act, number, 2.0)
    story.close()
    assert story.over and not story.quarantined
    assert [type(effect) for effect in story.effects].count(FetchLanded) == complete


def test_blocks_of_a_paced_fetch_are_accepted_once_every_rank_has_room() -> None:
    fetch = session(block_ids=(7,), paced=4)
    assert fetch.prepare(group_maps((2,), 1, 2), 2) == [Expect(LINK, TAG, FIRST, (7,), False, True)]
    assert fetch.expecting(0, 0.0) == []
    request, accept = fetch.expecting(1, 0.0)
    assert isinstance(request, PrefillRequest) and request.paced
    assert accept == Accept(TRANSFER, FIRST + 1), "it may be sent as soon as it is there"
    assert fetch.on_ready(BlocksReady(TRANSFER, FIRST + 3)) == [BlocksComing(TRANSFER, 3)]
    assert fetch.on_ready(BlocksReady(TRANSFER, FIRST + 2)) == []
    assert fetch.on_ready(BlocksReady(TRANSFER, FIRST + 900)) == [BlocksComing(TRANSFER, 4)], "no more than are wanted"
    assert fetch.accept((3, 9), 0.5) == [ExpectMore(LINK, TAG, (3, 9))]
    assert fetch.expecting(0, 0.5) == []
    assert fetch.accept((7,), 0.6) == [ExpectMore(LINK, TAG, (7,))], "a place may serve again"
    assert fetch.expecting(0, 0.6) == []
    assert fetch.expecting(1, 0.6) == [Accept(TRANSFER, FIRST + 3)]
    assert fetch.expecting(1, 0.6) == [Accept(TRANSFER, FIRST + 4)]
    assert fetch.expecting(1, 0.6) == []


def test_a_paced_fetch_says_what_has_landed_and_is_forgotten_at_its_end() -> None:
    fetch = session(block_ids=(), paced=4)
    fetch.prepare(group_maps((2,), 1, 1), 1)
    fetch.expecting(0, 0.0)
    fetch.on_ready(BlocksReady(TRANSFER, END))
    before = fetch.outstanding
    fetch.accept((7, 3, 9, 4), 0.0)
    assert (before, fetch.outstanding) == (False, True), "where nothing may be sent, nothing stalls"
    assert land(fetch, FIRST + 1) == []
    assert land(fetch, FIRST) == [BlocksLanded(TRANSFER, 2)]
    assert fetch.on_first_token(TOKEN, 0.5) == [ARRIVED]
    assert land(fetch, FIRST + 2) == [BlocksLanded(TRANSFER, 3)]
    done, forget, end = land(fetch, FIRST + 3)
    assert (done, forget) == (Done(TRANSFER), Forget(LINK, TAG))
    assert isinstance(end, FetchLanded)
    assert fetch.accept((5,), 1.0) == [] and fetch.on_ready(BlocksReady(TRANSFER, END)) == []


def test_a_paced_fetch_that_fails_quarantines_each_place_once() -> None:
    fetch = session(block_ids=(7,), paced=4)
    fetch.prepare(group_maps((2,), 1, 1), 1)
    fetch.expecting(0, 0.0)
    land(fetch, FIRST)
    fetch.accept((7, 3), 0.0)
    assert fetch.on_failed(Failed(TRANSFER, "why")) == [Forget(LINK, TAG)]
    assert fetch.forgotten(0, (7,)) == [FetchFailed(TRANSFER, "why", 1, (7,), FailureKind.FAILED)]


# ------------------------------------------------------------ cached blocks

HASHES = tuple(bytes([index]) * 32 for index in range(len(BLOCK_IDS)))


def cached(
    *, checked: bool = False, ranks: int = 1, block_ids: tuple[int, ...] = BLOCK_IDS, paced: int = 0
) -> FetchSession:
    target = PrefillTarget("p", "tcp://p:1", b"p" * 16)
    order = CachedFetchOrder(TRANSFER, target, HASHES, block_ids, DEADLINE_S, "chat-1", paced)
    made = FetchSession(order, TAG, LINK, bytes(order.num_blocks), (SIZE,), 0.0, checked=checked)
    assert made.prepare(group_maps((2,), 1, ranks), ranks) == [Expect(LINK, TAG, 0, block_ids, checked, bool(paced))]
    request, *accept = [effect for rank in range(ranks) for effect in made.expecting(rank, 1.0)]
    assert request == CachedRequest(
        transfer_id=TRANSFER,
        tag=TAG,
        hashes=HASHES,
        deadline_s=DEADLINE_S - 1,
        digests=checked,
        paced=bool(paced),
        request_id="chat-1",
    )
    assert accept == ([Accept(TRANSFER, len(block_ids))] if paced and block_ids else [])
    return made


def corrupt(effects: list[FetchEffect], fetch: FetchSession, landed: int = 0) -> bool:
    """Returns whether the fetch has failed as corrupt, with so many blocks that may be used."""
    assert effects == [Cancel(TRANSFER), Forget(LINK, TAG)]
    (failed,) = fetch.forgotten(0, ())
    assert isinstance(failed, FetchFailed)
    return (failed.kind, failed.landed) == (FailureKind.CORRUPT, landed)


def test_a_holder_that_has_all_blocks() -> None:
    fetch = cached()
    assert land(fetch, 0, 1) == []
    assert fetch.on_held(Held(TRANSFER, 4), 0.5) == []
    assert fetch.on_held(Held(TRANSFER, 3), 0.5) == [], "it counts once"
    assert land(fetch, 2, 3) == [Done(TRANSFER), FetchLanded(TRANSFER, 1.0, 4 * SIZE, 0.5, 2 * SIZE, 4)]
    assert fetch.state is FetchState.ENDED


@pytest.mark.parametrize("paced", [0, 4])
def test_a_holder_that_has_nothing(paced: int) -> None:
    fetch = cached(paced=paced, ranks=2)
    assert fetch.on_held(Held(TRANSFER, 0), 1.5) == [Done(TRANSFER), Forget(LINK, TAG)]
    assert fetch.over
    assert fetch.forgotten(0, ()) == []
    assert fetch.forgotten(1, ()) == [FetchLanded(TRANSFER, 1.5, 0, 0.0, 0, 0)]
    assert fetch.state is FetchState.ENDED


def test_blocks_that_the_holder_lacks_are_given_back_once_no_rank_writes_to_them() -> None:
    fetch = cached()
    fetch.on_held(Held(TRANSFER, 2), 0.5)
    assert land(fetch, 1, 0) == [Done(TRANSFER), Forget(LINK, TAG)]
    assert fetch.on_failed(Failed(TRANSFER, "late")) == []
    assert fetch.cancel() == [], "the end is settled, and the event queue makes a cancel of it"
    reason = "a holder of 2 blocks sends others, too"
    assert fetch.forgotten(0, (9,)) == [FetchFailed(TRANSFER, reason, 2, (9,), FailureKind.CORRUPT)]
    assert fetch.released(0, (9,)) == [BlocksReleased((9,))]
    assert fetch.state is FetchState.ENDED


def test_a_link_that_closes_after_the_last_block_takes_nothing_back() -> None:
    fetch = cached()
    fetch.on_held(Held(TRANSFER, 1), 0.5)
    land(fetch, 0)
    (end,) = fetch.closed(FailureKind.PEER_LOST, "gone")
    assert isinstance(end, FetchLanded) and end.landed == 1


@given(st.sampled_from([1, 2]), st.booleans(), st.integers(0, 4), st.data())
def test_cached_blocks_land_in_every_order_of_news(ranks: int, checked: bool, count: int, data: st.DataObject) -> None:
    fetch = cached(checked=checked, ranks=ranks)
    news = [(what, rank, index) for what in ("land", "announce") for rank in range(ranks) for index in range(count)]
    effects: list[FetchEffect] = []
    for what, rank, index in data.draw(st.permutations([*news, ("held", 0, 0)])):
        assert not any(isinstance(effect, Done) for effect in effects) or not checked
        match what:
            case "land":
                effects += fetch.landed(rank, (index,), (index,) if checked else (), 2.0)
            case "announce" if checked:
                effects += fetch.on_digests(Digests(TRANSFER, 0, rank, index, (index,)), 2.0)
            case "held":
                effects += fetch.on_held(Held(TRANSFER, count), 2.0)
    for rank in range(ranks):
        effects += fetch.forgotten(rank, ())
    done, *forget, landed = effects
    assert done == Done(TRANSFER)
    assert forget == ([] if count == len(HASHES) else [Forget(LINK, TAG)])
    assert isinstance(landed, FetchLanded)
    assert (landed.landed, landed.bytes) == (count, count * SIZE)


def test_a_holder_that_has_more_than_it_was_asked_for() -> None:
    fetch = cached()
    land(fetch, 0)
    assert corrupt(fetch.on_held(Held(TRANSFER, 5), 0.5), fetch, landed=1)


@pytest.mark.parametrize("checked", [True, False])
def test_a_holder_that_has_sent_more_than_it_counts(checked: bool) -> None:
    fetch = cached(checked=checked)
    land(fetch, 2)
    assert corrupt(fetch.on_held(Held(TRANSFER, 2), 0.5), fetch)


@pytest.mark.parametrize("before", [True, False])
def test_a_holder_that_announces_more_than_it_counts(before: bool) -> None:
    fetch = cached(checked=True)
    counted, announced = Held(TRANSFER, 2), Digests(TRANSFER, 0, 0, 1, (1, 2))
    first = fetch.on_digests(announced, 0.5) if before else fetch.on_held(counted, 0.5)
    assert first == []
    assert corrupt(fetch.on_held(counted, 0.5) if before else fetch.on_digests(announced, 0.5), fetch)


def test_a_holder_that_goes_on_after_its_count() -> None:
    fetch = cached()
    fetch.on_held(Held(TRANSFER, 2), 0.5)
    land(fetch, 0)
    assert corrupt(land(fetch, 3), fetch, landed=1)


def test_digests_of_blocks_that_nobody_asked_for() -> None:
    fetch = cached(checked=True)
    assert corrupt(fetch.on_digests(Digests(TRANSFER, 0, 0, 4, (1,)), 0.5), fetch)


def test_an_answer_of_the_other_kind_is_none() -> None:
    fetch = cached()
    assert corrupt(fetch.on_first_token(TOKEN, 0.5), fetch)
    prompt = moving()
    assert corrupt(prompt.on_held(Held(TRANSFER, 4), 0.5), prompt)


def test_a_paced_fetch_of_cached_blocks_takes_what_the_holder_has() -> None:
    fetch = cached(block_ids=(7,), paced=4)
    assert fetch.on_ready(BlocksReady(TRANSFER, 2)) == [BlocksComing(TRANSFER, 2)]
    assert fetch.on_held(Held(TRANSFER, 2), 0.5) == []
    assert fetch.accept((3,), 0.5) == [ExpectMore(LINK, TAG, (3,))]
    assert fetch.expecting(0, 0.5) == [Accept(TRANSFER, 2)]
    assert land(fetch, 0) == [BlocksLanded(TRANSFER, 1)]
    assert fetch.outstanding
    assert land(fetch, 1) == [Done(TRANSFER), Forget(LINK, TAG)]
    assert fetch.forgotten(0, ()) == [FetchLanded(TRANSFER, 1.0, 2 * SIZE, 0.5, 2 * SIZE, 2)]


def test_a_holder_may_count_before_a_paced_block_is_ready() -> None:
    fetch = cached(block_ids=(), paced=4)
    assert fetch.on_held(Held(TRANSFER, 1), 0.5) == []
    assert not fetch.outstanding, "nothing may be sent, so nothing stalls"
    assert fetch.on_ready(BlocksReady(TRANSFER, 1)) == [BlocksComing(TRANSFER, 1)]
    assert corrupt(fetch.on_ready(BlocksReady(TRANSFER, 2)), fetch)


def test_a_paced_holder_that_counts_fewer_than_are_ready() -> None:
    fetch = cached(block_ids=(), paced=4)
    fetch.on_ready(BlocksReady(TRANSFER, 3))
    assert corrupt(fetch.on_held(Held(TRANSFER, 2), 0.5), fetch)
