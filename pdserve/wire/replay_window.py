"""Which of one sender's counters were used: in memory that does not grow with the number of frames, and for ever."""

from __future__ import annotations

WINDOW = 65_536
"""How many later frames of its sender may be taken before one: 16 times what a proxy lets in at once by default."""

_MASK = (1 << WINDOW) - 1


class RisingCounter:
    """For frames that come in the order in which they were sent. Counters begin at 1."""

    def __init__(self) -> None:
        self._last = 0

    def use(self, counter: int) -> bool:
        """Whether it is higher than all before."""
        if counter <= self._last:
            return False
        self._last = counter
        return True


class ReplayWindow:
    """For frames that may overtake each other: the sliding window of RFC 4303. What is behind it counts as used."""

    def __init__(self) -> None:
        self._highest = 0
        self._used = 1
        """Bit i is for counter ``_highest`` - i."""

    def use(self, counter: int) -> bool:
        """Whether this is the first use of ``counter``, and not too far behind to be sure of it."""
        ahead = counter - self._highest
        if ahead > 0:
            self._used = ((self._used << min(ahead, WINDOW)) | 1) & _MASK
            self._highest = counter
            return True
        bit = 1 << -ahead if -ahead < WINDOW else 0
        if not bit or self._used & bit:
            return False
        self._used |= bit
        return True
