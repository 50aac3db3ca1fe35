"""What ``pdserve up`` and its servers write: the lines on stderr that matter (``Console``), and all, in files.

``ServerLogs`` has the files, one for each server, in a folder for each run.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pdserve.config import LogLevel
from pdserve.log_format import as_text

_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR)\b")
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")
_BAR_CELLS = 20


class _Screen(RichConsole):
    def on_broken_pipe(self) -> None:
        # The terminal is gone; the cluster still has to be stopped in order.
        self.quiet = True


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
        self.screen: RichConsole = _Screen(
            file=out,
            force_terminal=terminal or colour,
            color_system="standard" if colour else None,
            highlight=False,
            markup=False,
            emoji=False,
        )
        """Where the lines go. What else moves on this terminal, such as a bar of a download, uses it, too."""
        self._hidden = _below(level)
        self._keep = keep
        self._terminal = terminal
        self._live: Live | None = None
        self._names: dict[str, int] = {}
        self._width = 9
        self._start = time.monotonic()
        self._held: list[Text] | None = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def shows_progress(self) -> bool:
        """Whether ``progress`` prints anything."""
        return self._terminal

    def say(self, text: str) -> None:
        """Prints a line about the cluster itself, with the time since the start."""
        self._write(Text(f"[{self.elapsed_s:6.1f} s] {text}"))

    def relay(self, name: str, line: str) -> None:
        """Prints a line that the process ``name`` wrote, unless it is a log line below this console's level."""
        if self._keep is not None:
            self._keep(name, line)
        line = as_text(line)
        found = _LEVEL.search(line)
        if found and found[0] in self._hidden:
            return
        index = self._names.setdefault(name, len(self._names))
        self._width = max(self._width, len(name))
        label = (f"{name:{self._width}} |", _COLOURS[index % len(_COLOURS)])
        self._write(Text.assemble(label, f" {line}"))

    def progress(self, share: float, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Shows a bar, which is full at a ``share`` of 1, and a row for each name, below all lines of the terminal.

        They stay there, and change with the next call, until ``end_progress``.
        """
        if not self._terminal or self._held is not None:
            return
        heading = Table.grid(padding=(0, 1))
        heading.add_row(ProgressBar(total=1.0, completed=share, width=_BAR_CELLS), Text(title))
        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(f"  {name}"), Text(text))
        with suppress(OSError):
            if self._live is None:
                self._live = Live(
                    console=self.screen,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                    vertical_overflow="crop",
                )
                self._live.start()
            self._live.update(Group(heading, table), refresh=True)

    def end_progress(self) -> None:
        """Takes away what ``progress`` shows."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps lines back until the end of the block, in which something else writes to the same terminal."""
        self.end_progress()
        held: list[Text] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            for line in held:
                self._write(line)

    def _write(self, line: Text) -> None:
        if self._held is not None:
            self._held.append(line)
            return
        # The terminal may be gone; the cluster still has to be stopped in order.
        with suppress(OSError):
            self.screen.print(line, soft_wrap=True)


def _below(level: LogLevel) -> frozenset[str]:
    names = [known.name for known in LogLevel]
    return frozenset(names[: names.index(level.name)])


MAX_BYTES = 16 * 2**20
"""A file of this size becomes ``NAME.log.1``, in place of the one before."""
REMEMBERED_RUNS = 8
AGAIN_S = 10.0

_RUN = re.compile(r"\d{8}-\d{6}-(?P<pid>\d+)")


class _LineFile(RotatingFileHandler):
    failure: BaseException | None = None
    lost = 0
    """The lines that could not be written since the last one that was."""
    again_s = 0.0

    def handleError(self, record: logging.LogRecord) -> None:  # the base class's name
        self.failure = sys.exception()


class ServerLogs:
    """Writes each server's lines to ``folder/NAME.log``. A disk that takes no more lines stops nothing.

    It is tried again every ``AGAIN_S``; a line in the file then says how many are missing.
    """

    def __init__(
        self, folder: Path, tell: Callable[[str], None] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``tell`` tells the user what happens to the files."""
        self.folder = folder
        self._tell = tell
        self._clock = clock
        self._files: dict[str, _LineFile] = {}

    def write(self, name: str, line: str) -> None:
        """Appends a line of the server ``name``."""
        file = self._files.get(name)
        if file is None:
            path = self.path(name)
            file = _LineFile(path, maxBytes=MAX_BYTES, backupCount=1, delay=True, encoding="utf-8", errors="replace")
            self._files[name] = file
        if file.lost and self._clock() < file.again_s:
            file.lost += 1
            return
        if file.lost:
            self._emit(file, f"[{file.lost} lines could not be written]")
        if file.failure is None:
            self._emit(file, line)
        failure, file.failure = file.failure, None
        if failure is None:
            if file.lost:
                self._tell(f"{file.baseFilename} can be written again; {file.lost} lines are missing")
            file.lost = 0
            return
        with suppress(OSError):  # what its buffer holds fails again
            file.close()
        if not file.lost:
            self._tell(f"{file.baseFilename} cannot be written: {failure}; it is tried again every {AGAIN_S:g} s")
        file.lost += 1
        file.again_s = self._clock() + AGAIN_S

    @staticmethod
    def _emit(file: _LineFile, line: str) -> None:
        file.emit(logging.makeLogRecord({"msg": line}))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()


@contextmanager
def server_logs(parent: Path, tell: Callable[[str], None] = lambda _: None) -> Iterator[ServerLogs]:
    """Makes a folder for this run in ``parent``, and removes those of old runs. Raises OSError if it cannot be made.

    ``tell`` tells the user what happens to its files later.
    """
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700, parents=True)
    _remove_old(parent)
    logs = ServerLogs(folder, tell)
    try:
        yield logs
    finally:
        logs.close()


def _remove_old(parent: Path) -> None:
    runs = sorted((path.name, found["pid"]) for path in parent.iterdir() if (found := _RUN.fullmatch(path.name)))
    for name, pid in runs[:-REMEMBERED_RUNS]:
        # A cluster that has run for long still writes to its folder.
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(parent / name, ignore_errors=True)
