"""Measures how much CPU time a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_s(call: Callable[[], object], runs: int = 4) -> float:
    """Returns the least CPU time of several runs, since other load on the machine can only add to one."""

    def once() -> float:
        began = time.thread_time()
        call()
        return time.thread_time() - began

    return min(once() for _ in range(runs))
