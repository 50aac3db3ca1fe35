"""What ``pdserve up`` prints on stderr: its own progress, and the lines of its child processes that matter."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from pdserve.config import LogLevel
from pdserve.log_format import as_text

_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b")
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)
_CLEAR = "\r\x1b[2K"
_BAR_CELLS = 20


class Console:
    """Writes one line at a time, marked with the process that it is about."""

    def __init__(
        self,
        out: TextIO,
        *,
        colour: bool,
        level: LogLevel = LogLevel.INFO,
        keep: Callable[[str, str], None] | None = None,
        terminal: bool = False,
        logs: str = "",
    ) -> None:
        """Lines of processes below ``level`` are not printed. ``keep`` gets the name and text of all of them.

        ``logs`` is the folder in which ``keep`` keeps them, if it does.

        Only a ``terminal`` shows how far things are while they move.
        """
        self.logs = logs
        self._out = out
        self._hidden = _below(level)
        self._keep = keep
        self._colour = colour
        self._terminal = terminal
        self._status = ""
        self._names: dict[str, int] = {}
        self._width = 9
        self._start = time.monotonic()
        self._held: list[str] | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def shows_progress(self) -> bool:
        """Whether ``progress`` prints anything."""
        return self._terminal

    def say(self, text: str) -> None:
        """Prints a line about the cluster itself, with the time since the start."""
        self._write(self._stamped(text))

    def relay(self, name: str, line: str) -> None:
        """Prints a line that the process ``name`` wrote, unless it is a log line below this console's level."""
        if self._keep is not None:
            self._keep(name, line)
        line = as_text(line)
        found = _LEVEL.search(line)
        if found and found[0] in self._hidden:
            return
        label = f"{name:{self._width}} |"
        self._write(f"{self._paint(name, label)} {line}")

    def progress(self, share: float, text: str) -> None:
        """Shows a bar on the terminal's last line, in place of the one before. The next line takes it away."""
        if not self._terminal or self._held is not None:
            return
        filled = round(share * _BAR_CELLS)
        line = self._stamped("█" * filled + "░" * (_BAR_CELLS - filled) + f" {text}")
        # A line that wraps could not be taken away.
        line = line[: shutil.get_terminal_size().columns - 1]
        if line != self._status:
            self._status = line
            self._print(_CLEAR + line, end="")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps lines back until the end of the block, in which something else writes to the same terminal."""
        self._take_away_progress()
        held: list[str] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            for line in held:
                self._write(line)

    def _stamped(self, text: str) -> str:
        return f"[{self.elapsed_s:6.1f} s] {text}"

    def _paint(self, name: str, text: str) -> str:
        index = self._names.setdefault(name, len(self._names))
        self._width = max(self._width, len(name))
        return f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{text}\x1b[0m" if self._colour else text

    def _write(self, line: str) -> None:
        if self._held is not None:
            self._held.append(line)
            return
        self._take_away_progress()
        self._print(line, end="\n")

    def _take_away_progress(self) -> None:
        if self._status:
            self._status = ""
            self._print(_CLEAR, end="")

    def _print(self, text: str, end: str) -> None:
        try:
            print(text, file=self._out, end=end, flush=True)
        except OSError:
            # The terminal is gone; the cluster still has to be stopped in order.
            return


def _below(level: LogLevel) -> frozenset[str]:
    names = [known.name for known in LogLevel]
    return frozenset(names[: names.index(level.name)])
