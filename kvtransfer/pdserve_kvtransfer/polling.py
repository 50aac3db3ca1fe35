"""When a transfer thread polls again: at once, after a moment, or only when it is woken."""

from __future__ import annotations

import math
import sys
import time

# While blocks move, sleeping this long between two polls lets a batch of UCX's fragments gather. A thread that is woken
# for each fragment moves a tenth of the bytes a second, and one that spins takes the core from the sender.
_PAUSE_S = 50e-6
_BUSY_WINDOW_S = 2e-3

SWITCH_S = 0.5e-3
"""A thread that computes in Python gives the interpreter's lock away after this time, once another one waits for it."""


def share_interpreter() -> None:
    """Makes the other threads of this process let a transfer thread in after ``SWITCH_S`` instead of Python's 5 ms.

    Each poll of a link gives the interpreter's lock away while data moves, and has to get it back.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


class BusyPoll:
    """Decides for a loop whether it polls again or waits to be woken. It remembers when data last moved."""

    def __init__(self) -> None:
        self._moved_at = -math.inf

    def again(self, moved: bool, moving: bool, now: float) -> bool:
        """Returns whether to poll again without waiting to be woken. It may have slept for a moment."""
        if moved:
            self._moved_at = now
            return True
        if moving and now - self._moved_at < _BUSY_WINDOW_S:
            time.sleep(_PAUSE_S)
            return True
        return False
