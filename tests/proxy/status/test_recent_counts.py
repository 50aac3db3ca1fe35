"""Counts by steps of time keep the last minutes, and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve_proxy.recent import STEP_S, STEPS, RecentCounts, step_of


@given(st.lists(st.tuples(st.floats(0, 4000), st.integers(0, 9)), max_size=200))
def test_the_last_steps_have_the_sums_of_what_came(added: list[tuple[float, int]]) -> None:
    counts = RecentCounts()
    wanted: dict[int, int] = {}
    for at_s, number in sorted(added):
        counts.add(at_s, number)
        wanted[step_of(at_s)] = wanted.get(step_of(at_s), 0) + number
    kept = counts.by_step()
    assert len(kept) <= STEPS + 1
    newest = max(wanted, default=0)
    for step, number in wanted.items():
        if step >= newest - STEPS:
            assert kept[step] == number


def test_memory_is_bounded_however_long_it_counts() -> None:
    counts = RecentCounts()
    for step in range(10 * STEPS):
        counts.add(step * STEP_S)
    assert len(counts.by_step()) == STEPS + 1
