"""A queue whose items expire a fixed time after they were added, with one timer for all of them.

A timer for each request would be made and cancelled for each, although almost none of them ever fires.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_TICK_S = 0.001
"""The resolution of the event loop's clock: an item that is due within it is due now."""


class ExpiryQueue(Generic[T]):
    """Items of which each is taken out after ``after_s`` and then passed to ``on_expiry``."""

    def __init__(self, after_s: float, on_expiry: Callable[[T], object]) -> None:
        self._after_s = after_s
        self._on_expiry = on_expiry
        self._loop = asyncio.get_running_loop()
        self._due_s: OrderedDict[T, float] = OrderedDict()
        """When each item is due, in that order, which is also the order in which they were added."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: T) -> None:
        """Adds ``item``, which must not be in the queue."""
        due_s = self._due_s[item] = self._loop.time() + self._after_s
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._expire)

    def discard(self, item: T) -> None:
        self._due_s.pop(item, None)

    def pop_oldest(self) -> T:
        """Takes out the oldest item and returns it. Raises KeyError if there is none."""
        return self._due_s.popitem(last=False)[0]

    def pop_newest(self) -> T:
        """Takes out the newest item and returns it. Raises KeyError if there is none."""
        return self._due_s.popitem()[0]

    def close(self) -> None:
        """Empties the queue, so that nothing expires any more."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        now = self._loop.time() + _TICK_S
        try:
            while self._due_s and next(iter(self._due_s.values())) <= now:
                self._on_expiry(self.pop_oldest())
        finally:  # the items behind one whose expiry failed need the timer too
            first_s = next(iter(self._due_s.values()), None)
            self._timer = None if first_s is None else self._loop.call_at(first_s, self._expire)
