"""Finds markers like ``<tool_call>`` in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_BLANK = 64
"""How many spaces before a marker are held back, to be left out if it comes."""


class Found(NamedTuple):
    """The first marker of a text, or none."""

    start: int
    """Where the marker begins; without one, where the text begins that may become one."""
    marker: str
    """Empty if the text has no marker."""


def find_marker(text: str, markers: Sequence[str]) -> Found:
    """Returns the marker that begins first."""
    starts = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    if starts:
        return Found(*min(starts))
    return Found(len(text) - _held(text, markers), "")


def begins(text: str, marker: str) -> bool | None:
    """Returns whether ``text`` begins with ``marker``; None if it is too short to say."""
    if text.startswith(marker):
        return True
    return None if marker.startswith(text) else False


def _held(text: str, markers: Sequence[str]) -> int:
    """Returns how many of the last characters may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for start in range(max(len(text) - longest, 0), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return len(text) - start
    return 0
