"""Ends an output at the first stop string, and never shows a client the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Of one output. Which stop string wins does not depend on how the text was split: the one that ends first."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in stops), default=0)
        self._inner = frozenset(char for stop in stops for char in stop[:-1])
        self._held = ""
        self.found = False

    @property
    def wanted(self) -> bool:
        """There is something to look for."""
        return bool(self._stops)

    def add(self, text: str, *, may_end: bool = True) -> str:
        """The text that may be shown now. After ``found`` the output is over.

        Where it may not end, no stop string is found, but one may begin that ends later.
        """
        if not self._stops or self.found:
            return "" if self.found else text
        known, text = len(self._held), self._held + text
        # What was looked at before may hold a whole stop string only where the output was not allowed to end.
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop, max(known - len(stop) + 1, 0))) >= 0
        ]
        if matches and may_end:
            end, start = min(matches)
            self.found, self._held = True, ""
            return text[: end if self._include else start]
        keep = self._held_back(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _held_back(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        if not text or text[-1] not in self._inner:
            return 0
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
