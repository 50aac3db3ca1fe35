"""What expires some time after it was put in, with one timer for all of it.

A timer of its own for each request would be made and cancelled for each, when next to none ever fires.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_TICK_S = 0.001
"""Of the event loop's clock: what is due within it is due now."""


class ExpiryQueue(Generic[T]):
    """``on_expiry`` is called with what has been inside for ``after_s``; then it is inside no longer."""

    def __init__(self, after_s: float, on_expiry: Callable[[T], object]) -> None:
        self._after_s = after_s
        self._on_expiry = on_expiry
        self._loop = asyncio.get_running_loop()
        self._due_s: OrderedDict[T, float] = OrderedDict()
        """In the order of both: all stay equally long."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: T) -> None:
        """``item`` is not inside."""
        due_s = self._due_s[item] = self._loop.time() + self._after_s
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._expire)

    def discard(self, item: T) -> None:
        self._due_s.pop(item, None)

    def pop_oldest(self) -> T:
        """Raises KeyError if there is none."""
        return self._due_s.popitem(last=False)[0]

    def pop_newest(self) -> T:
        """Raises KeyError if there is none."""
        return self._due_s.popitem()[0]

    def close(self) -> None:
        """Nothing inside expires any more."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        now = self._loop.time() + _TICK_S
        try:
            while self._due_s and next(iter(self._due_s.values())) <= now:
                self._on_expiry(self.pop_oldest())
        finally:  # also for those behind one whose expiry failed
            first_s = next(iter(self._due_s.values()), None)
            self._timer = None if first_s is None else self._loop.call_at(first_s, self._expire)
