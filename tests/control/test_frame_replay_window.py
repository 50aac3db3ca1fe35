"""Tests the replay window against a set that forgets nothing."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.control.frame import WINDOW, ReplayWindow, RisingCounter

near = st.integers(1, 40)
edges = st.sampled_from([1, 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW, 2 * WINDOW + 1, 2**63 - 1])
counters = st.lists(near | edges, max_size=60)


@given(counters)
@example([WINDOW + 1, 1, 2, 2])
@example([1, WINDOW + 1, 1])
@example([1, 2**63 - 1, 2**63 - WINDOW, 2**63 - 1 - WINDOW])
def test_no_counter_is_used_twice_and_none_in_the_window_is_refused_once(sent: list[int]) -> None:
    window = ReplayWindow()
    used: set[int] = set()
    for counter in sent:
        in_window = counter > max(used, default=0) - WINDOW
        assert window.use(counter) == (in_window and counter not in used)
        used.add(counter)


@given(counters)
def test_where_order_is_kept_only_a_higher_one_is_new(sent: list[int]) -> None:
    rising = RisingCounter()
    for index, counter in enumerate(sent):
        assert rising.use(counter) == (counter > max(sent[:index], default=0))
