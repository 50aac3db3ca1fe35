"""Tests that requests take turns to get host memory for transfers, and give it back."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kv_connector.staging.staged_transfers import StagingBlocks
from pdserve.wire.ids import TransferId, new_id

HERE, THERE = b"here", b"there"


def transfer() -> TransferId:
    return TransferId(new_id(), 0, b"boot")


def taken(staging: StagingBlocks) -> list[tuple[TransferId, int]]:
    return [(of, len(own)) for of, own in staging.granted()]


def test_staging_blocks_come_by_turns() -> None:
    staging = StagingBlocks(range(32))
    long, short = transfer(), transfer()
    staging.want(long, HERE, 1000)
    staging.want(short, THERE, 3)
    assert taken(staging) == [(long, 2), (short, 2), (long, 2), (short, 1), (long, 2), (long, 2)]
    assert staging.wants(long) and not staging.wants(short)


def test_no_transfer_and_no_peer_keeps_the_others_out() -> None:
    staging = StagingBlocks(range(32))
    stuck = [transfer() for _ in range(5)]
    for one in stuck:
        staging.want(one, HERE, 1000)
    held = taken(staging)
    assert all(sum(count for of, count in held if of == one) <= 8 for one in stuck), "a quarter"
    assert staging.num_free == 16, "half"
    other = transfer()
    staging.want(other, THERE, 5)
    assert sum(count for _, count in taken(staging)) == 5


def test_who_wants_no_more_gets_none_and_gives_back_what_it_has() -> None:
    staging = StagingBlocks(range(4))
    first, second = transfer(), transfer()
    staging.want(first, HERE, 9)
    ((_, own),) = staging.granted()
    staging.withdraw(first)
    staging.give_back(first, own)
    assert taken(staging) == [] and staging.num_free == 4
    staging.want(second, HERE, 1)
    staging.withdraw(second)
    staging.withdraw(second)
    assert taken(staging) == []
    assert not staging._holders and not staging._held_by_peer


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=20),
    st.randoms(use_true_random=False),
)
def test_no_staging_block_has_two_owners_and_all_are_served(
    total: int, wanted: list[tuple[int, int]], random: Random
) -> None:
    staging = StagingBlocks(range(total))
    left = {}
    for count, peer in wanted:
        left[transfer()] = count
        staging.want(list(left)[-1], bytes([peer]), count)
    held: list[tuple[TransferId, tuple[int, ...]]] = []
    while any(left.values()):
        before = len(held)
        for of, own in staging.granted():
            assert not set(own) & {staged_id for _, other in held for staged_id in other}
            left[of] -= len(own)
            held.append((of, own))
        assert len(held) > before or held, "somebody can go on, or has something to give back"
        of, own = held.pop(random.randrange(len(held)))
        staging.give_back(of, own)
    for of, own in held:
        staging.give_back(of, own)
    assert staging.num_free == total
    assert not staging._holders and not staging._held_by_peer
