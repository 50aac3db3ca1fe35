"""The files in which ``pdserve up`` keeps what its servers write."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_BYTES = 16 * 2**20
"""A file of this size becomes ``NAME.log.1``, in place of the one before."""
KEPT_RUNS = 8

_RUN = re.compile(r"\d{8}-\d{6}-(?P<pid>\d+)")


class _LineFile(RotatingFileHandler):
    failure: BaseException | None = None

    def handleError(self, record: logging.LogRecord) -> None:  # the base class's name
        self.failure = sys.exception()


class ServerLogs:
    """Writes each server's lines to ``folder/NAME.log``. A disk that takes no more lines stops nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _LineFile] = {}

    def write(self, name: str, line: str) -> None:
        """Appends a line of the server ``name``."""
        file = self._files.get(name)
        if file is None:
            path = self.path(name)
            file = _LineFile(path, maxBytes=MAX_BYTES, backupCount=1, delay=True, encoding="utf-8", errors="replace")
            self._files[name] = file
        if file.failure is None:
            file.emit(logging.makeLogRecord({"msg": line}))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()


@contextmanager
def server_logs(parent: Path) -> Iterator[ServerLogs]:
    """Makes a folder for this run in ``parent``, and removes those of old runs. Raises OSError if it cannot be made."""
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700, parents=True)
    _remove_old(parent)
    logs = ServerLogs(folder)
    try:
        yield logs
    finally:
        logs.close()


def _remove_old(parent: Path) -> None:
    runs = sorted((path.name, found["pid"]) for path in parent.iterdir() if (found := _RUN.fullmatch(path.name)))
    for name, pid in runs[:-KEPT_RUNS]:
        # A cluster that has run for long still writes to its folder.
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(parent / name, ignore_errors=True)
