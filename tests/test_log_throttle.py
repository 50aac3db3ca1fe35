"""A kind of event has one log line per interval, whose count leaves out no event."""

from __future__ import annotations

from pdserve.log_format import LogThrottle


def test_the_first_event_is_logged_at_once_and_later_lines_count_those_between() -> None:
    throttle = LogThrottle(10.0)
    assert [throttle.add(now) for now in (0.0, 1.0, 9.9, 10.0, 11.0, 25.0)] == [1, 0, 0, 3, 0, 2]
