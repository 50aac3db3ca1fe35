"""What ``pdserve up`` prints on stderr: its own progress, and the lines of its child processes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from pdserve.config import LogLevel

_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b")
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)


class Console:
    """Writes one line at a time, marked with the process that it is about."""

    def __init__(self, out: TextIO, *, colour: bool, level: LogLevel = LogLevel.INFO) -> None:
        self._out = out
        self._hidden = _below(level)
        self._colour = colour
        self._names: dict[str, int] = {}
        self._width = 9
        self._start = time.monotonic()
        self._held: list[str] | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """Prints a line about the cluster itself, with the time since the start."""
        self._write(f"[{self.elapsed_s:6.1f} s] {text}")

    def relay(self, name: str, line: str) -> None:
        """Prints a line that the process ``name`` wrote, unless it is a log line below this console's level."""
        found = _LEVEL.search(line)
        if found and found[0] in self._hidden:
            return
        label = f"{name:{self._width}} |"
        self._write(f"{self._paint(name, label)} {line}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps lines back until the end of the block, in which something else writes to the same terminal."""
        held: list[str] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            for line in held:
                self._write(line)

    def _paint(self, name: str, text: str) -> str:
        index = self._names.setdefault(name, len(self._names))
        self._width = max(self._width, len(name))
        return f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{text}\x1b[0m" if self._colour else text

    def _write(self, line: str) -> None:
        if self._held is not None:
            self._held.append(line)
            return
        try:
            print(line, file=self._out, flush=True)
        except OSError:
            # The terminal is gone; the cluster still has to be stopped in order.
            return


def _below(level: LogLevel) -> frozenset[str]:
    names = [known.name for known in LogLevel]
    return frozenset(names[: names.index(level.name)])
