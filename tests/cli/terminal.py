"""A program in a terminal of its own: the test types, and reads what is shown."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.eventually import eventually
from tests.processes import clean_environ

WAIT_S = 60.0
_AWAKE_S = 2.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\]8;[^\x1b]*\x1b\\")
"""Colours, movements of the cursor, and the addresses of links."""


@dataclass
class Terminal:
    """A running program, and the other end of its terminal."""

    process: subprocess.Popen[bytes]
    master: int
    slave: int
    shown: str = ""
    """All that was drawn, with its escape sequences."""
    plain: str = ""
    """The same without them, and with plain ends of lines."""
    _unread: str = ""
    """What may be the beginning of an escape sequence."""
    _seen: int = 0

    def until(self, words: str, timeout_s: float = WAIT_S) -> str:
        """Returns what is drawn, without escape sequences, from the last call's end to the end of ``words``."""
        deadline = time.monotonic() + timeout_s
        while (found := self.plain.find(words, self._seen)) < 0:
            left = deadline - time.monotonic()
            assert left > 0 and self._read(left), f"no {words!r} in {self.plain[self._seen :]!r}"
        begin, self._seen = self._seen, found + len(words)
        return self.plain[begin : self._seen]

    def rest(self) -> str:
        """Returns what has been drawn since the last call of ``until``, without escape sequences."""
        while self._read(0.0):
            pass
        return self.plain[self._seen :]

    def _read(self, within_s: float) -> bool:
        """Returns whether the program has drawn something in this time."""
        if not select.select([self.master], [], [], within_s)[0]:
            return False
        try:
            data = os.read(self.master, 65536).decode(errors="replace")
        except OSError:
            return False
        self.shown += data
        text = _ESCAPES.sub("", self._unread + data).replace("\r\n", "\n")
        cut = max(text.rfind("\x1b"), len(text) - 1 if text.endswith("\r") else -1)
        self._unread = text[cut:] if cut >= 0 else ""
        self.plain += text[:cut] if cut >= 0 else text
        return True

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def line(self, text: str) -> None:
        self.type(text + "\r")

    def press_ctrl_c(self) -> None:
        """Presses it once the program waits: readline does not look at a signal that comes while it draws a letter."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "S", "the program waits")
        self.type("\x03")

    def press_ctrl_d(self) -> None:
        self.type("\x04")

    def mode(self) -> int:
        flags: int = termios.tcgetattr(self.slave)[3]
        return flags & (termios.ICANON | termios.ECHO)

    def wait(self) -> int:
        """Returns the exit status."""
        return self.process.wait(WAIT_S)


# Ctrl-C reaches the processes whose controlling terminal this is.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-P", "-m", "pdserve", *sys.argv[1:]])
"""


@contextmanager
def pdserve_in_terminal(*argv: str, columns: int = 100, rows: int = 30, **environ: str) -> Iterator[Terminal]:
    """Runs ``pdserve <argv>`` in a terminal, and ends it at the end of the block."""
    env: Mapping[str, str] = clean_environ(**{"TERM": "xterm", **environ})
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _TAKE_TERMINAL, *argv],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
        start_new_session=True,
    )
    try:
        yield Terminal(process, master, slave)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_AWAKE_S)
            except subprocess.TimeoutExpired:
                # A signal that comes while readline makes its prompt is heard with the next key.
                os.write(master, b"\r")
                try:
                    process.wait(WAIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
