"""Keeps events that a peer can cause at will from filling the log."""

from __future__ import annotations


class LogThrottle:
    """Counts the events of one kind, and lets one log line through every ``every_s`` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s = float("-inf")
        self._events = 0

    def add(self, now: float) -> int:
        """Counts one event. Returns how many there were since the last line if another is due, and otherwise 0."""
        self._events += 1
        if now < self._next_s:
            return 0
        events, self._events = self._events, 0
        self._next_s = now + self._every_s
        return events
