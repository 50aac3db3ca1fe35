"""Tests that each head of each decode rank comes from exactly one prefill rank that holds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_kvtransfer.pieces import Piece, group_maps, head_map, heads_of


def fits(ranks: int, kv_heads: int) -> bool:
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


COUNTS = range(1, 13)
FITTING = [(ranks, kv_heads) for ranks in COUNTS for kv_heads in COUNTS if fits(ranks, kv_heads)]
PAIRS = [(heads, sources, targets) for sources, heads in FITTING for targets in COUNTS if fits(targets, heads)]


@given(st.sampled_from(PAIRS))
def test_each_head_is_sent_once_to_each_rank_that_holds_it(pair: tuple[int, int, int]) -> None:
    kv_heads, sources, targets = pair
    pieces = head_map(kv_heads, sources, targets)
    for target in range(targets):
        mine = [piece for piece in pieces if piece.target == target]
        assert [piece.part for piece in mine] == list(range(len(mine)))
        assert {piece.parts for piece in mine} == {len(mine)}
        assert len({piece.source for piece in mine}) == len(mine), "one piece from each source"
        got = [
            (piece.target_head + i, heads_of(piece.source, sources, kv_heads)[piece.source_head + i])
            for piece in mine
            for i in range(piece.heads)
        ]
        assert got == list(enumerate(heads_of(target, targets, kv_heads)))


@given(st.sampled_from(FITTING))
def test_ranks_hold_all_heads_evenly(fitting: tuple[int, int]) -> None:
    ranks, kv_heads = fitting
    held = [heads_of(rank, ranks, kv_heads) for rank in range(ranks)]
    assert len({len(heads) for heads in held}) == 1
    assert [held.count(heads) for heads in held] == [max(1, ranks // kv_heads)] * ranks
    assert sorted({head for heads in held for head in heads}) == list(range(kv_heads))


def test_the_usual_cases() -> None:
    assert head_map(2, 1, 1) == (Piece(0, 0, 0, 0, 2, 0, 1, 1),)
    assert head_map(2, 1, 2) == (Piece(0, 0, 0, 0, 1, 0, 1, 1), Piece(0, 1, 1, 0, 1, 0, 1, 1))
    assert head_map(2, 2, 1) == (Piece(0, 0, 0, 0, 1, 0, 2, 2), Piece(1, 0, 0, 1, 1, 1, 2, 2))
    assert [piece.source for piece in head_map(2, 4, 4)] == [0, 1, 2, 3], "replicas are spread"


@pytest.mark.parametrize(("kv_heads", "ranks"), [(3, 2), (2, 3), (4, 6)])
def test_uneven_ranks_are_refused(kv_heads: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{kv_heads} heads cannot be spread evenly over {ranks} ranks"):
        heads_of(0, ranks, kv_heads)


def test_a_block_without_heads_comes_whole_from_one_rank_to_each() -> None:
    assert [(piece.source, piece.target) for piece in head_map(0, 2, 4)] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert [(piece.source, piece.target) for piece in head_map(0, 4, 2)] == [(0, 0), (1, 1)]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_no_two_pieces_of_a_rank_have_one_index(sources: int, targets: int, data: st.DataObject) -> None:
    fitting = [count for count in range(7) if not count or (fits(sources, count) and fits(targets, count))]
    heads = data.draw(st.lists(st.sampled_from(fitting), min_size=2, max_size=4))
    maps = group_maps(heads, sources, targets)
    for target in range(targets):
        # Blocks of all groups, by turns.
        mine = [piece.index(block) for block in range(8) for piece in maps[block % len(maps)] if piece.target == target]
        assert len(set(mine)) == len(mine)
        assert sorted(mine) == mine
