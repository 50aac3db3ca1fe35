"""Who still lives, by the clock alone. Times are seconds of ``time.monotonic()``, handed in."""

from __future__ import annotations


class Lease:
    """Runs out ``duration_s`` after the last renewal, while it is held; not held, it never does."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._extended_s = 0.0
        """Since the last renewal."""
        self.until: float | None = None
        """When it runs out; None while not held."""

    def hold(self, now: float) -> None:
        """Start, unless it is running."""
        if self.until is None:
            self.until, self._extended_s = now + self._duration_s, 0.0

    def renew(self, now: float) -> None:
        """The other side was heard."""
        if self.until is not None:
            self.until, self._extended_s = now + self._duration_s, 0.0

    def extend(self, blocked_s: float) -> None:
        """For so long the other side could not be heard. At most one duration is added between two renewals: by then
        the other side has given up as well, because it was not answered.
        """
        if self.until is not None:
            granted = min(blocked_s, self._duration_s - self._extended_s)
            self.until += granted
            self._extended_s += granted

    def shorten(self, until: float) -> None:
        """Something suggests that the other side is gone: it has until then to show that it is not."""
        if self.until is not None:
            self.until = min(self.until, until)

    def release(self) -> None:
        self.until = None

    def expired_while(self, busy: bool, now: float) -> bool:
        """Hold it for as long as ``busy`` is said at each look, and let it go otherwise. Whether it has run out."""
        if busy:
            self.hold(now)
        else:
            self.release()
        return self.expired(now)

    def expired(self, now: float) -> bool:
        return self.until is not None and now >= self.until


_SHORTEST_INTERVAL_S = 0.01
"""What the settings allow at the least; a peer that asks for more pings does not get them."""


class PingTimer:
    """Due every ``interval_s`` while running."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.next: float | None = None

    def keep(self, lease_s: float, now: float) -> None:
        """The other side gives up after so long a silence: be heard at least twice in it, if it is not absurd."""
        self._interval_s = min(self._interval_s, max(lease_s / 2, _SHORTEST_INTERVAL_S))
        if self.next is not None:
            self.next = min(self.next, now + self._interval_s)

    def run(self, now: float) -> None:
        """Start, unless it is running."""
        if self.next is None:
            self.next = now + self._interval_s

    def stop(self) -> None:
        self.next = None

    def due(self, now: float) -> bool:
        """Whether to send one now; if so, the next is an interval away."""
        if self.next is None or now < self.next:
            return False
        self.next = now + self._interval_s
        return True
