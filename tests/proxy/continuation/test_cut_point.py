"""A move waits until a block is full, but only where that spares replaying much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.journal import Journal, JournaledChoice
from pdserve.wire.terms import Prepared
from pdserve_proxy.continuation.move import FEW_TOKENS, FullBlockWatch, lacking_now, tokens_to_wait

BLOCK = 16
WITHIN_BLOCK = st.lists(st.integers(1, BLOCK), min_size=1, max_size=5)


def prepared(lacking: list[int]) -> Prepared:
    return Prepared(True, BLOCK, dict(enumerate(lacking)))


@given(st.integers(1, BLOCK), st.integers(0, 3 * BLOCK), st.integers(1, 4))
def test_choices_that_have_begun_together_wait_for_a_full_block_and_its_next_token(
    lacked: int, came: int, choices: int
) -> None:
    now = [lacked + came] * choices
    more = tokens_to_wait(now, prepared([lacked] * choices))
    if lacked + came <= FEW_TOKENS:
        assert more is None
    else:
        assert more is not None
        assert more in range(BLOCK)
        assert (now[0] + more) % BLOCK == 1


@given(WITHIN_BLOCK)
def test_of_other_choices_the_sum_of_what_is_left_is_the_least(lacking: list[int]) -> None:
    def left_after(more: int) -> int:
        return sum((tokens + more - 1) % BLOCK for tokens in lacking)

    more = tokens_to_wait(lacking, prepared(lacking))
    if more is not None:
        assert left_after(more) == min(map(left_after, range(100)))


def test_nothing_is_waited_for_in_vain() -> None:
    assert tokens_to_wait([BLOCK + 5], prepared([BLOCK + 1])) is None, "its holders did not have the full blocks"
    assert tokens_to_wait([], prepared([])) is None
    assert tokens_to_wait([9], Prepared(True)) is None, "the node does not say"


@given(WITHIN_BLOCK, st.integers(0, 20))
def test_tokens_may_come_one_by_one_or_together(lacking: list[int], came: int) -> None:
    def journal(tokens: int) -> Journal:
        return Journal({number: JournaledChoice([5] * tokens) for number in range(len(lacking))})

    more = tokens_to_wait([tokens + came for tokens in lacking], prepared(lacking))
    together, one_by_one = FullBlockWatch(prepared(lacking)), FullBlockWatch(prepared(lacking))
    for watch in (together, one_by_one):
        assert watch.show(journal(came)) is (None if more is None else more == 0)
    if more:
        assert [one_by_one.show(journal(1)) for _ in range(more)] == [False] * (more - 1) + [True]
        assert together.show(journal(more)) is True


def test_a_choice_that_has_ended_counts_no_more() -> None:
    later = Journal({0: JournaledChoice([5, 6]), 1: JournaledChoice([7], over=True)})
    assert lacking_now({0: 3, 1: 9, 2: 1}, later) == {0: 5, 2: 1}
