"""Timers that tell whether the other engine is alive. Callers pass times, in seconds of ``time.monotonic()``."""

from __future__ import annotations


class Lease:
    """A lease that runs out ``duration_s`` after its last renewal while it is held. One that is not held never does."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._extended_s = 0.0
        """By how much it was extended since the last renewal."""
        self.until: float | None = None
        """When it runs out. None while it is not held."""

    def hold(self, now: float) -> None:
        """Starts it, unless it is running."""
        if self.until is None:
            self.until, self._extended_s = now + self._duration_s, 0.0

    def renew(self, now: float) -> None:
        """Starts it anew, because the other side was heard."""
        if self.until is not None:
            self.until, self._extended_s = now + self._duration_s, 0.0

    def extend(self, blocked_s: float) -> None:
        """Extends it by the time in which the other side could not be heard.

        At most one duration is added between two renewals. By then the other side has given up as well, because it was
        not answered.
        """
        if self.until is not None:
            granted = min(blocked_s, self._duration_s - self._extended_s)
            self.until += granted
            self._extended_s += granted

    def shorten(self, until: float) -> None:
        """Makes it run out at ``until`` if it is not renewed, because the other side may be gone."""
        if self.until is not None:
            self.until = min(self.until, until)

    def release(self) -> None:
        self.until = None

    def expired_while(self, busy: bool, now: float) -> bool:
        """Holds it while ``busy``, and releases it otherwise. Returns whether it has run out."""
        if busy:
            self.hold(now)
        else:
            self.release()
        return self.expired(now)

    def expired(self, now: float) -> bool:
        return self.until is not None and now >= self.until


_SHORTEST_INTERVAL_S = 0.01
"""The shortest interval that the settings allow. A peer that asks for more pings does not get them."""


class PingTimer:
    """A timer of pings that are due every ``interval_s`` while it runs."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.next: float | None = None

    def keep(self, lease_s: float, now: float) -> None:
        """Makes at least two pings due in the other side's lease, as far as ``_SHORTEST_INTERVAL_S`` allows."""
        self._interval_s = min(self._interval_s, max(lease_s / 2, _SHORTEST_INTERVAL_S))
        if self.next is not None:
            self.next = min(self.next, now + self._interval_s)

    def run(self, now: float) -> None:
        """Starts it, unless it is running."""
        if self.next is None:
            self.next = now + self._interval_s

    def stop(self) -> None:
        self.next = None

    def due(self, now: float) -> bool:
        """Returns whether a ping is due now. If so, the next one is due after an interval."""
        if self.next is None or now < self.next:
            return False
        self.next = now + self._interval_s
        return True
