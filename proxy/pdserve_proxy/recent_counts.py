"""Counts how much came in each of the last steps of time, so that those who look see the last minutes at once."""

from __future__ import annotations

STEP_S = 5
"""A step takes so many seconds. Steps have numbers: the monotonic clock divided by this."""
STEPS = 60
"""So many whole steps are remembered."""


def step_of(at_s: float) -> int:
    """Returns the number of the step that ``at_s`` lies in."""
    return int(at_s // STEP_S)


class RecentCounts:
    """The sums of what came in each step, in a bounded number of steps. Steps in which nothing came are not stored."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def add(self, at_s: float, number: int = 1) -> None:
        """Adds ``number`` to the step of ``at_s``, a time that is hardly before those of earlier calls."""
        step = step_of(at_s)
        if step in self._sums:
            self._sums[step] += number
            return
        self._sums[step] = number
        # The present step and all whole ones before it.
        while len(self._sums) > STEPS + 1:
            del self._sums[min(self._sums)]

    def by_step(self) -> dict[int, int]:
        """Returns the sums by the numbers of their steps. Some may be older than what is shown."""
        return dict(self._sums)
