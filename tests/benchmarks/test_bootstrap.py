"""Tests the interval that rounds give a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.bootstrap import HIGH, LOW, interval

VALUES = [1.0, 2.0, 3.0, 4.0]


def mean(rounds: Sequence[int]) -> float:
    return statistics.fmean(VALUES[i] for i in rounds)


def ends(rounds: int) -> dict[str, float]:
    return {figure.name: figure.value for figure in interval("mean", rounds, mean)}


def test_an_interval_has_the_ends_of_what_drawn_rounds_give() -> None:
    found = ends(4)
    assert set(found) == {"mean" + LOW, "mean" + HIGH}
    assert 1.0 < found["mean" + LOW] < mean(range(4)) < found["mean" + HIGH] < 4.0
    assert ends(4) == found


def test_one_round_and_rounds_without_a_value_have_no_interval() -> None:
    assert interval("mean", 1, mean) == []
    assert interval("mean", 4, lambda rounds: math.nan) == []


def test_draws_without_a_value_are_left_out() -> None:
    found = interval("mean", 4, lambda rounds: math.nan if 0 in rounds else mean(rounds))
    assert all(figure.value >= 2.0 for figure in found)
    assert len(found) == 2
