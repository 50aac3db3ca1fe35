"""Sends or receives that were posted and have not ended, without looking at each of them in every turn."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

WINDOW = 16


class Operation(Protocol):
    def done(self) -> bool: ...


T = TypeVar("T", bound=Operation)


class InFlight(Generic[T]):
    """In the order of posting. They end in about that order, so that a look at the oldest few finds those that did.

    One of them may be stuck, though, and others behind it ended: ``settled`` is for that.
    """

    def __init__(self) -> None:
        self._open: deque[T] = deque()
        self._thorough = False
        self._seen_all = True

    def __len__(self) -> int:
        return len(self._open)

    def add(self, operation: T) -> None:
        self._open.append(operation)
        self._seen_all = False

    def take_done(self) -> list[T]:
        """Those found to have ended, oldest first."""
        limit = len(self._open) if self._thorough else WINDOW
        done: list[T] = []
        waiting: list[T] = []
        while self._open and len(waiting) < limit:
            operation = self._open.popleft()
            (done if operation.done() else waiting).append(operation)
        self._seen_all = not self._open
        self._thorough = False
        self._open.extendleft(reversed(waiting))
        return done

    def settled(self) -> bool:
        """Whether the last ``take_done`` looked at all; if not, the next one will. To be asked before sleeping."""
        self._thorough = not self._seen_all
        return self._seen_all

    def take_all(self) -> list[T]:
        everything = list(self._open)
        self.clear()
        return everything

    def clear(self) -> None:
        self._open.clear()
        self._seen_all = True
