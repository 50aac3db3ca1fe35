"""When a transfer thread looks again: at once, after a moment, or only when it is woken."""

from __future__ import annotations

import math
import sys
import time

# While blocks move, sleeping this long between two looks lets a batch of UCX's fragments gather. Being woken for each
# fragment instead moves a tenth of the bytes a second, and spinning takes the core from whoever is sending.
_PAUSE_S = 50e-6
_BUSY_WINDOW_S = 2e-3

SWITCH_S = 0.5e-3
"""A thread that computes in Python gives the interpreter's lock away after this time, once another one waits for it."""


def share_interpreter() -> None:
    """Have the other threads of this process let a transfer thread in within ``SWITCH_S`` instead of Python's 5 ms.

    Each look at a link gives the lock away while data moves, and has to get it back.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


class BusyPoll:
    """For a loop of turns; remembers when something last moved."""

    def __init__(self) -> None:
        self._moved_at = -math.inf

    def again(self, moved: bool, moving: bool, now: float) -> bool:
        """Whether to look again without waiting to be woken; a moment may have passed."""
        if moved:
            self._moved_at = now
            return True
        if moving and now - self._moved_at < _BUSY_WINDOW_S:
            time.sleep(_PAUSE_S)
            return True
        return False
