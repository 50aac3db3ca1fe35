"""Waits for what no event announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

TIMEOUT_S = 60.0
POLL_S = 0.005

T = TypeVar("T")


def eventually(probe: Callable[[], T | None], what: str = "", timeout_s: float = TIMEOUT_S) -> T:
    """Returns the first true value of ``probe``. Fails the test if none comes in ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen in {timeout_s:g} s: {what or 'what the test waits for'}")
        time.sleep(POLL_S)
    return value
