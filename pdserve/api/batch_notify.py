"""Wakes the readers of a step's outputs in groups, with a turn of the event loop between groups.

All woken at once, a thousand readers would each put their text together before the first of their bytes leaves, and
before any other connection gets a turn. In groups the first one's bytes are on their way while the last one waits.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Reader(Protocol):
    def wake(self) -> None:
        """It has something to read, or had: being woken for nothing does no harm."""


class BatchNotify:
    """First come, first woken: no more than ``size`` in one turn of the running loop, or all at once if 0.

    It holds no outputs, so it cannot change their order: what comes for a reader that is still to be woken is read by
    it in one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._pending: dict[Reader, None] = {}
        self._scheduled = False

    def add(self, reader: Reader) -> None:
        """To be woken by ``notify``; again before that changes nothing."""
        self._pending[reader] = None

    def notify(self) -> None:
        """Wakes the first group, unless one was woken in this turn already; the rest follows turn by turn."""
        if not self._size:
            pending, self._pending = self._pending, {}
            for reader in pending:
                reader.wake()
        elif not self._scheduled:
            self._wake_group()

    def _wake_group(self) -> None:
        group = list(self._pending) if len(self._pending) <= self._size else self._first()
        for reader in group:
            del self._pending[reader]
            reader.wake()
        self._scheduled = bool(group)
        if group:
            # Behind the group's own steps, which waking has just queued.
            self._loop.call_soon(self._wake_group)

    def _first(self) -> list[Reader]:
        return [reader for reader, _ in zip(self._pending, range(self._size), strict=False)]
