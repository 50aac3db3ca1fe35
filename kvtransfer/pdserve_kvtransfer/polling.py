"""When a transfer thread polls again: at once, after a moment, or only when it is woken."""

from __future__ import annotations

import math
import time

# While blocks move, sleeping this long between two polls lets a batch of UCX's fragments gather. A thread that is woken
# for each fragment moves a tenth of the bytes a second, and one that spins takes the core from the sender.
_PAUSE_S = 50e-6
_BUSY_WINDOW_S = 2e-3


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
