"""Tests transfers of models with cache groups: each block of each group lands whole where it belongs, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdserve.wire.cache_groups import GroupSpec, Keep
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SampledToken
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    BlocksReleased,
    CachedWanted,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
)
from tests.eventually import eventually
from tests.kvtransfer.grouped import GROUPS, REPLICATED, STATE, WHOLE, WINDOW, GroupedNodes, grouped_nodes
from tests.kvtransfer.inproc import Fabric

TOKENS = 100
"""A prompt of seven blocks, the last of which is partial. Its window has the last three."""
ONLY_STATES = (GroupSpec("all", Keep.ALL, 0, 0, 0, "bf16"), STATE)
ONE_HEAD = (WHOLE, WINDOW, msgspec.structs.replace(STATE, heads=1, head_bytes=1000))


@pytest.mark.parametrize(
    "groups", [GROUPS, (WHOLE, WINDOW, REPLICATED), ONE_HEAD, ONLY_STATES, (WHOLE, REPLICATED, STATE)]
)
@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2)])
def test_every_head_of_every_group_arrives_where_it_belongs(
    sources: int, targets: int, groups: Sequence[GroupSpec], tmp_path: Path
) -> None:
    with grouped_nodes(tmp_path, sources, targets, groups, counts=(20, 9, 5)) as both:
        order, moved = both.order(TOKENS, 1), both.moved(TOKENS, 1)
        given = both.prefill.ids(moved)
        contents = [both.prefill.fill(block) for block in given]
        both.decode.engine.thread.fetch(order)
        assert both.prefill.engine.next(PushWanted).first_block == 1
        for first in range(0, len(given), 4):
            both.prefill.engine.thread.push(order.transfer_id, 1 + first, given[first : first + 4])
        both.prefill.engine.thread.first_token(order.transfer_id, (SampledToken(1),), 0)
        both.decode.engine.next(FirstTokenArrived)
        landed = both.decode.engine.next(FetchLanded)
        assert landed.landed == len(moved)
        assert landed.bytes == sum(
            groups[block.group].head_bytes * max(1, groups[block.group].heads) for block in moved
        )
        assert [both.decode.read(block) for block in order.block_ids] == contents
        assert both.prefill.engine.next(PushEnded).outcome is PushOutcome.DONE
        untouched = {block for group in both.decode.groups for block in group.ids if group.block_bytes}
        for block in untouched.difference(order.block_ids):
            assert not any(map(any, both.decode.read(block)))


def test_only_what_the_window_has_moves() -> None:
    assert [WINDOW.needed(tokens, 16) for tokens in (31, 32, 47, 48, 100)] == [
        range(2),
        range(2),
        range(1, 3),
        range(1, 3),
        range(4, 7),
    ]


def stopped_with_half_a_state(both: GroupedNodes, fabric: Fabric) -> tuple[TransferId, tuple[int, ...]]:
    """Starts a transfer whose blocks have landed but for the states, of which every piece is accepted."""
    order = both.order(TOKENS)
    given, count = both.prefill.ids(both.moved(TOKENS)), len(order.block_ids)
    both.decode.engine.thread.fetch(order)
    both.prefill.engine.next(PushWanted)
    both.prefill.engine.thread.push(order.transfer_id, 0, given[:-1])
    whole = sum(map(both.decode.engine.region.group_bytes, map(both.decode.engine.region.group_of, order.block_ids)))
    state = both.decode.engine.region.group_bytes(2)
    eventually(lambda: both.decode.engine.thread.stats().bytes_received >= (whole - state) * both.decode.ranks)
    fabric.hold()
    both.prefill.engine.thread.push(order.transfer_id, count - 1, given[-1:])
    eventually(lambda: fabric.stuck() == both.decode.ranks)
    return order.transfer_id, order.block_ids


def test_a_sender_that_dies_in_the_middle_of_a_state_leaves_that_alone_in_quarantine(tmp_path: Path) -> None:
    fabric = Fabric()
    with grouped_nodes(tmp_path, 2, 2, fabric=fabric) as both:
        _, block_ids = stopped_with_half_a_state(both, fabric)
        both.prefill.engine.close()
        failed = both.decode.engine.next(FetchFailed)
        assert (failed.landed, failed.quarantined) == (len(block_ids) - 1, block_ids[-1:])
        assert both.decode.engine.next(BlocksReleased).block_ids == block_ids[-1:]
        eventually(lambda: both.decode.engine.thread.stats().quarantined_blocks == 0)


def test_a_cancel_in_the_middle_of_a_state_waits_for_it(tmp_path: Path) -> None:
    fabric = Fabric()
    with grouped_nodes(tmp_path, 2, 2, fabric=fabric) as both:
        transfer, block_ids = stopped_with_half_a_state(both, fabric)
        both.decode.engine.thread.cancel_fetch(transfer)
        assert both.decode.engine.next(FetchCancelled).quarantined == block_ids[-1:]
        both.prefill.engine.next(PushCancelled)
        fabric.release()
        eventually(lambda: both.decode.engine.thread.stats().quarantined_blocks == 0)
        assert both.prefill.engine.next(PushEnded).outcome is PushOutcome.CANCELLED


def test_a_state_that_is_not_what_was_sent_is_corrupt(tmp_path: Path) -> None:
    fabric = Fabric()
    with grouped_nodes(tmp_path, fabric=fabric) as both:
        stopped_with_half_a_state(both, fabric)
        # Its digest was taken when it was posted.
        both.prefill.engine.region.block(both.prefill.ids(both.moved(TOKENS))[-1])[7] ^= 1
        fabric.release()
        failed = both.decode.engine.next(FetchFailed)
        assert failed.kind is FailureKind.CORRUPT


def test_a_paced_transfer_takes_the_blocks_of_all_groups_in_their_order(tmp_path: Path) -> None:
    with grouped_nodes(tmp_path, 1, 2) as both:
        whole, given = both.order(TOKENS), both.prefill.ids(both.moved(TOKENS))
        contents = [both.prefill.fill(block) for block in given]
        order = replace(whole, block_ids=whole.block_ids[:5], paced_blocks=len(whole.block_ids))
        transfer, decode, prefill = order.transfer_id, both.decode.engine, both.prefill.engine
        decode.thread.fetch(order)
        prefill.next(PushWanted)
        prefill.thread.push(transfer, 0, given)
        prefill.thread.first_token(transfer, (SampledToken(1),), 0)
        seen = [decode.take()]
        while BlocksLanded(transfer, 5) not in seen:
            seen.append(decode.take())
        assert BlocksComing(transfer, len(given)) in seen
        decode.thread.accept_blocks(transfer, whole.block_ids[5:])
        while not isinstance(seen[-1], FetchLanded):
            seen.append(decode.take())
        assert [both.decode.read(block) for block in whole.block_ids] == contents


def test_a_destination_of_another_group_is_refused(tmp_path: Path) -> None:
    with grouped_nodes(tmp_path) as both:
        order = both.order(TOKENS)
        state, block = order.block_ids[-1], order.block_ids[0]
        with pytest.raises(ValueError, match="another cache group"):
            both.decode.engine.thread.fetch(replace(order, block_ids=(state, *order.block_ids[1:-1], block)))


def test_a_sender_that_takes_one_group_for_another_gives_up(tmp_path: Path) -> None:
    with grouped_nodes(tmp_path) as both:
        order, given = both.order(TOKENS), both.prefill.ids(both.moved(TOKENS))
        both.decode.engine.thread.fetch(order)
        both.prefill.engine.next(PushWanted)
        both.prefill.engine.thread.push(order.transfer_id, 0, (given[-1],))
        assert "of one cache group for those of another" in both.decode.engine.next(FetchFailed).reason


@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (2, 1), (1, 2)])
def test_cached_blocks_come_with_the_window_and_state_behind_them_or_not_at_all(
    sources: int, targets: int, tmp_path: Path
) -> None:
    with grouped_nodes(tmp_path, sources, targets) as both:
        order, given = both.cached(5), both.prefill.ids(both.moved(80))
        assert [block.number for block in both.moved(80) if block.group == 1] == [3, 4]
        contents = [both.prefill.fill(block) for block in given]
        decode, prefill = both.decode.engine, both.prefill.engine
        decode.thread.fetch(order)
        prefill.next(CachedWanted)
        prefill.thread.push(order.transfer_id, 0, given)
        prefill.thread.held(order.transfer_id, 5)
        assert decode.next(FetchLanded).landed == len(given)
        assert [both.decode.read(block) for block in order.block_ids] == contents
        assert prefill.next(PushEnded).outcome is PushOutcome.DONE
        again = both.cached(5)
        decode.thread.fetch(again)
        prefill.next(CachedWanted)
        prefill.thread.held(again.transfer_id, 0, 4)
        landed = decode.next(FetchLanded)
        assert (landed.landed, landed.usable) == (0, 4)
        assert prefill.next(PushEnded).outcome is PushOutcome.DONE


def test_a_holder_that_sends_a_part_of_the_groups_is_given_up(tmp_path: Path) -> None:
    with grouped_nodes(tmp_path) as both:
        order = both.cached(5)
        both.decode.engine.thread.fetch(order)
        both.prefill.engine.next(CachedWanted)
        both.prefill.engine.thread.held(order.transfer_id, 4)
        assert "miscounted" in both.decode.engine.next(FetchFailed).reason
