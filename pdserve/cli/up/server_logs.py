"""The files in which ``pdserve up`` keeps what its servers write."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

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
