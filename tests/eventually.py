"""Waits for what no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT_S = 60.0
POLL_S = 0.005
LONGEST_POLL_S = 0.05
WAITED_SHARE = 0.02
"""Who has waited for long looks less often: many looks ask a node, which then works as much as for a token."""

T = TypeVar("T")


def eventually(probe: Callable[[], T | None], what: str = "", timeout_s: float = TIMEOUT_S) -> T:
    """Returns the first true value of ``probe``. Fails the test if none comes in ``timeout_s``."""
    began = time.monotonic()
    while not (value := probe()):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"did not happen in {timeout_s:g} s: {what or 'what the test waits for'}")
        time.sleep(min(max(POLL_S, WAITED_SHARE * waited_s), LONGEST_POLL_S))
    return value
