"""Tests that a transfer is complete when all ranks are, in every order of reports."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pdserve_kvtransfer.fetch.session import Aggregator, PieceCheck

FIRST, BLOCKS = 3, 3


@dataclass(frozen=True, slots=True)
class PieceKey:
    rank: int
    index: int


def keys(parts: list[int]) -> list[PieceKey]:
    return [
        PieceKey(rank, block * count + part)
        for rank, count in enumerate(parts)
        for block in range(FIRST, FIRST + BLOCKS)
        for part in range(count)
    ]


def value(key: PieceKey) -> int:
    return key.rank * 1000 + key.index


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans(), st.data())
def test_any_order_with_repeats_completes_once_with_the_last_piece(
    parts: list[int], checked: bool, data: st.DataObject
) -> None:
    wanted = keys(parts)
    news = [(kind, key) for key in wanted for kind in ("landed", "announced")]
    order = data.draw(st.permutations(news))
    repeats = data.draw(st.lists(st.sampled_from(news), max_size=6))
    for repeat in repeats:
        order.insert(data.draw(st.integers(0, len(order))), repeat)
    aggregator = Aggregator(FIRST, bytes(BLOCKS), [parts], checked=checked)
    seen: dict[str, set[PieceKey]] = {"landed": set(), "announced": set()}
    for kind, key in order:
        verdict = getattr(aggregator, kind)(key.rank, key.index, value(key))
        assert verdict is (PieceCheck.IGNORED if key in seen[kind] else PieceCheck.FINE)
        seen[kind].add(key)
        counted = seen["landed"] & seen["announced"] if checked else seen["landed"]
        assert aggregator.complete == (counted == set(wanted))
        whole = [
            all(key in counted for key in wanted if key.index // parts[key.rank] == block)
            for block in range(FIRST, FIRST + BLOCKS)
        ]
        assert aggregator.leading_blocks == [*whole, False].index(False)


@given(st.integers(-2, 5), st.integers(-5, 40))
def test_news_of_what_is_not_expected_changes_nothing(rank: int, index: int) -> None:
    parts = [2, 1]
    aggregator = Aggregator(FIRST, bytes(BLOCKS), [parts], checked=False)
    expected = PieceKey(rank, index) in keys(parts)
    assert aggregator.landed(rank, index, 0) is (PieceCheck.FINE if expected else PieceCheck.IGNORED)


def test_a_piece_that_is_not_what_was_announced_is_corrupt() -> None:
    for first, second in (("landed", "announced"), ("announced", "landed")):
        aggregator = Aggregator(0, bytes(1), [[1]], checked=True)
        assert getattr(aggregator, first)(0, 0, 5) is PieceCheck.FINE
        assert getattr(aggregator, second)(0, 0, 6) is PieceCheck.CORRUPT
        assert not aggregator.complete


def test_contradictory_announcements_are_corrupt() -> None:
    aggregator = Aggregator(0, bytes(1), [[1]], checked=True)
    aggregator.announced(0, 0, 5)
    assert aggregator.announced(0, 0, 6) is PieceCheck.CORRUPT
