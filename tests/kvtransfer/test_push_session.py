"""Tests the prefill side's session with every order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.ids import TransferId
from pdserve.wire.rank import SendBlocks
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import MAX_DEADLINE_S
from pdserve.wire.transfer import Accept, BlocksReady, CachedRequest, Failed, FirstToken, Held, PrefillRequest
from pdserve_kvtransfer.events import BlocksSent, CachedWanted, PushCancelled, PushEnded, PushOutcome, PushWanted
from pdserve_kvtransfer.push.session import PushEffect, PushSession, PushState
from tests.kvtransfer.rig import SAMPLING

TRANSFER = TransferId(b"r" * 16, 0, b"d" * 16)
TAG, LINK = 11, 3
DEADLINE_S, GRACE_S = 5.0, 0.5


def unopened(
    first_block: int = 1,
    pieces: int = 1,
    deadline_s: float = DEADLINE_S,
    *,
    reports_sent: bool = False,
    paced: bool = False,
) -> PushSession:
    request = PrefillRequest(
        transfer_id=TRANSFER,
        tag=TAG,
        token_ids=list(range(50)),
        first_block=first_block,
        sampling=SAMPLING,
        deadline_s=deadline_s,
        paced=paced,
    )
    groups = bytes(max(0, 4 - first_block))
    return PushSession(request, LINK, groups, pieces=(pieces,), now=0.0, grace_s=GRACE_S, reports_sent=reports_sent)


def opened() -> PushSession:
    push = unopened()
    push.open()
    return push


def test_the_engine_is_told_what_is_wanted() -> None:
    assert unopened().open() == [PushWanted(TRANSFER, list(range(50)), 1, SAMPLING, DEADLINE_S)]


def test_a_request_for_no_block_is_refused_unseen() -> None:
    push = unopened(first_block=4)
    (failed,) = push.open()
    assert isinstance(failed, Failed)
    assert push.state is PushState.ENDED


def test_blocks_are_sent_under_their_indexes() -> None:
    push = opened()
    assert push.push(1, (8, 9)) == [SendBlocks(LINK, TAG, 1, (8, 9), True)]
    assert push.push(3, (4,)) == [SendBlocks(LINK, TAG, 3, (4,), True)]
    assert push.first_token((SampledToken(5),), 16) == [FirstToken(TRANSFER, (SampledToken(5),), 16)]


@pytest.mark.parametrize(("first_block", "count"), [(0, 1), (3, 2), (4, 1)])
def test_blocks_out_of_range_fail_the_push(first_block: int, count: int) -> None:
    failed, cancelled, ended = opened().push(first_block, tuple(range(count)))
    assert isinstance(failed, Failed)
    assert (cancelled, ended) == (PushCancelled(TRANSFER), PushEnded(TRANSFER, PushOutcome.FAILED))


def test_the_end_waits_for_sends() -> None:
    push = opened()
    push.push(1, (8, 9, 4))
    assert push.on_done() == []
    assert push.sent(2) == []
    assert push.sent(1) == [PushEnded(TRANSFER, PushOutcome.DONE)]


def test_a_cancel_stops_the_engine_first() -> None:
    push = opened()
    push.push(1, (8,))
    assert push.on_cancel() == [PushCancelled(TRANSFER)]
    assert push.push(2, (9,)) == []
    assert push.first_token((SampledToken(1),), 0) == []
    assert push.sent(1) == [PushEnded(TRANSFER, PushOutcome.CANCELLED)]


def test_the_engine_may_refuse() -> None:
    assert opened().refuse("full") == [Failed(TRANSFER, "full"), PushEnded(TRANSFER, PushOutcome.FAILED)]


def test_a_long_reason_is_cut() -> None:
    failed = opened().refuse("x" * 5_000)[0]
    assert isinstance(failed, Failed) and len(failed.reason) == 2_000


def test_the_deadline_has_a_grace() -> None:
    push = opened()
    assert push.expire(DEADLINE_S + GRACE_S - 0.01) == []
    failed, *rest = push.expire(DEADLINE_S + GRACE_S)
    assert isinstance(failed, Failed) and "deadline" in failed.reason
    assert rest == [PushCancelled(TRANSFER), PushEnded(TRANSFER, PushOutcome.FAILED)]


def test_a_closed_link_ends_it_whatever_was_in_flight() -> None:
    push = opened()
    push.push(1, (8, 9))
    _, cancelled = push.lost(PushOutcome.LEASE_EXPIRED, "silent")
    assert cancelled == PushCancelled(TRANSFER)
    assert push.closed() == [PushEnded(TRANSFER, PushOutcome.LEASE_EXPIRED)]


def test_blocks_may_be_read_until_every_piece_has_left() -> None:
    push = unopened(pieces=3)
    push.open()
    push.push(1, (8, 9))
    push.on_done()
    assert push.sent(5) == []
    assert push.sent(1) == [PushEnded(TRANSFER, PushOutcome.DONE)]


def test_a_settled_outcome_stays_when_the_link_closes() -> None:
    push = opened()
    push.push(1, (8,))
    push.on_done()
    assert push.lost(PushOutcome.PEER_LOST, "gone") == []
    assert push.closed() == [PushEnded(TRANSFER, PushOutcome.DONE)]


@dataclass
class Story:
    """One session, and the state that the test expects of it."""

    push: PushSession = field(default_factory=unopened)
    effects: list[PushEffect] = field(default_factory=list)
    in_flight: int = 0
    next_index: int = 1
    refused: bool = False

    def note(self, effects: list[PushEffect]) -> None:
        for effect in effects:
            assert not any(isinstance(e, PushEnded) for e in self.effects), f"{effect} after the end"
            if isinstance(effect, SendBlocks):
                assert not any(isinstance(e, PushCancelled | Failed) for e in self.effects), "blocks after a cancel"
                self.in_flight += len(effect.block_ids)
            elif isinstance(effect, PushEnded):
                assert self.in_flight == 0, "blocks are still being read"
            self.effects.append(effect)

    def act(self, act: str, number: int, now: float) -> None:
        push = self.push
        match act:
            case "push" if self.next_index < 4:
                count = 1 + number % (4 - self.next_index)
                self.note(push.push(self.next_index, tuple(range(count))))
                self.next_index += count
            case "sent" if self.in_flight:
                count = 1 + number % self.in_flight
                self.in_flight -= count
                self.note(push.sent(count))
            case "token":
                self.note(push.first_token((SampledToken(number),), 0))
            case "refuse":
                self.refused |= push.state is PushState.PUSHING
                self.note(push.refuse("no"))
            case "done":
                self.note(push.on_done())
            case "cancel":
                self.note(push.on_cancel())
            case "expire":
                self.note(push.expire(now))

    def lose(self) -> None:
        self.note(self.push.lost(PushOutcome.PEER_LOST, "gone"))
        self.in_flight = 0
        self.note(self.push.closed())


COMMON = st.sampled_from(["push", "sent", "sent", "token"])
ENDS = st.sampled_from(["refuse", "done", "cancel", "expire"])
STEPS = st.lists(
    st.tuples(st.one_of(COMMON, COMMON, ENDS), st.integers(0, 7), st.floats(0, 0.6)), min_size=1, max_size=30
)


@given(STEPS)
def test_every_order_of_events_has_one_end(steps: list[tuple[str, int, float]]) -> None:
    story, now = Story(), 0.0
    story.note(story.push.open())
    for act, number, pause in steps:
        now += pause
        story.act(act, number, now)
    story.lose()
    said = [type(effect) for effect in story.effects]
    assert said[0] is PushWanted and said.count(PushWanted) == 1
    assert said.count(PushEnded) == 1 and said[-1] is PushEnded
    assert said.count(Failed) <= 1
    assert story.push.state is PushState.ENDED
    abnormal = story.push.outcome is not PushOutcome.DONE and not story.refused
    assert said.count(PushCancelled) == (1 if abnormal else 0)


@pytest.mark.parametrize("deadline_s", [1e300, float("inf")])
def test_a_deadline_that_no_timer_takes_is_a_day(deadline_s: float) -> None:
    push = unopened(deadline_s=deadline_s)
    (wanted,) = push.open()
    assert isinstance(wanted, PushWanted)
    assert (wanted.deadline_s, push.deadline) == (MAX_DEADLINE_S, MAX_DEADLINE_S + GRACE_S)


def test_the_engine_hears_when_all_that_it_pushed_so_far_has_left() -> None:
    push = unopened(pieces=2, reports_sent=True)
    push.open()
    push.push(1, (7, 8))
    assert push.sent(3) == []
    push.push(3, (9,))
    assert push.sent(1) == [], "something is in flight"
    assert push.sent(2) == [BlocksSent(TRANSFER, (7, 8, 9))]
    push.push(1, (7,))
    assert push.on_cancel() == [PushCancelled(TRANSFER)]
    assert push.sent(2) == [PushEnded(TRANSFER, PushOutcome.CANCELLED)]


def test_blocks_of_a_paced_push_wait_until_there_is_room_for_them() -> None:
    push = unopened(paced=True)
    push.open()
    assert push.push(1, (7, 8)) == [BlocksReady(TRANSFER, 3)]
    assert push.on_accept(Accept(TRANSFER, 2)) == [SendBlocks(LINK, TAG, 1, (7,), True)]
    assert push.on_accept(Accept(TRANSFER, 1)) == []
    assert push.on_accept(Accept(TRANSFER, 4)) == [SendBlocks(LINK, TAG, 2, (8,), True)]
    assert push.push(3, (9,)) == [BlocksReady(TRANSFER, 4), SendBlocks(LINK, TAG, 3, (9,), True)]
    push.sent(3)
    assert push.on_done() == [PushEnded(TRANSFER, PushOutcome.DONE)]


def test_a_paced_push_that_ends_sends_nothing_that_was_not_accepted() -> None:
    push = unopened(paced=True)
    push.open()
    push.push(1, (7, 8))
    assert push.on_cancel() == [PushCancelled(TRANSFER), PushEnded(TRANSFER, PushOutcome.CANCELLED)]
    assert push.on_accept(Accept(TRANSFER, 4)) == []


# ------------------------------------------------------------ cached blocks

HASHES = tuple(bytes([index]) * 32 for index in range(4))


def cached(*, paced: bool = False) -> PushSession:
    request = CachedRequest(
        transfer_id=TRANSFER, tag=TAG, hashes=HASHES, deadline_s=DEADLINE_S, paced=paced, request_id="chat-1"
    )
    push = PushSession(request, LINK, bytes(len(HASHES)), pieces=(1,), now=0.0, grace_s=GRACE_S)
    assert push.open() == [CachedWanted(TRANSFER, HASHES, DEADLINE_S, "chat-1")]
    return push


def gave_up(effects: list[PushEffect]) -> bool:
    failed, *rest = effects
    assert isinstance(failed, Failed)
    return rest == [PushCancelled(TRANSFER), PushEnded(TRANSFER, PushOutcome.FAILED)]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_holder_sends_what_it_has_and_says_how_much_that_is(count: int) -> None:
    push, blocks = cached(), tuple(range(30, 30 + count))
    assert push.push(0, blocks) == ([SendBlocks(LINK, TAG, 0, blocks, True)] if count else [])
    assert push.held(count) == [Held(TRANSFER, count)]
    assert push.held(count) == [], "it says so once"
    push.sent(count)
    assert push.on_done() == [PushEnded(TRANSFER, PushOutcome.DONE)]
    assert push.held(count) == []


def test_the_blocks_may_follow_the_count_if_they_are_copied_first() -> None:
    push = cached(paced=True)
    assert push.held(2) == [Held(TRANSFER, 2)]
    assert push.push(0, (7, 8)) == [BlocksReady(TRANSFER, 2)]
    assert push.on_accept(Accept(TRANSFER, 4)) == [SendBlocks(LINK, TAG, 0, (7, 8), True)]


@pytest.mark.parametrize("count", [1, 5])
def test_a_holder_that_counts_wrong_gives_up(count: int) -> None:
    push = cached(paced=True)
    push.push(0, (7, 8))
    assert gave_up(push.held(count))


def test_blocks_beyond_the_count_are_not_sent() -> None:
    push = cached()
    push.held(2)
    assert gave_up(push.push(0, (7, 8, 9)))


def test_an_asker_that_is_gone_is_answered_nothing() -> None:
    push = cached()
    assert push.on_cancel() == [PushCancelled(TRANSFER), PushEnded(TRANSFER, PushOutcome.CANCELLED)]
    assert push.held(0) == push.push(0, (7,)) == []


def test_cached_blocks_have_a_deadline_too() -> None:
    push = cached()
    assert push.expire(DEADLINE_S) == []
    assert gave_up(push.expire(DEADLINE_S + GRACE_S))
