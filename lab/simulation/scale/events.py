"""Virtual time: what is due next happens next, and nothing takes time by itself."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Events:
    """What will happen, in the order of its times; of equal times, in the order in which it was entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, time_s: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (max(time_s, self.now), next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        self.at(self.now + delay_s, call)

    def run_until(self, end_s: float) -> None:
        """Lets happen what is due before ``end_s``."""
        while self._due and self._due[0][0] <= end_s:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = end_s
