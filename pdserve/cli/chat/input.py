"""Reads messages in a terminal: with the line editing and the history of shells, and of several lines where wanted."""

from __future__ import annotations

import os
import re
import readline
import select
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROMPT, MORE = ">>> ", "... "
COMMAND = re.compile(r"(/[a-z?]+)(?:\s+(.*))?")
"""A message that is a command: its name and what follows. It has one line."""
BLOCK = '"""'
"""A line that begins with it begins a message of several lines, which ends with it."""
_MOST_LINES = 1000
_PASTE_S = 0.02
"""Nobody types so soon after the end of a line: what comes within it was pasted, and is of the same message."""


class LineReader:
    """The prompt. ``history`` is the file that keeps the lines from one chat to the next."""

    def __init__(self, history: Path) -> None:
        self._history = history
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("tab: complete")
        readline.set_completer_delims(" \t\n")
        readline.set_history_length(_MOST_LINES)
        # Bytes that are no UTF-8 would be no text for a server either.
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        with suppress(OSError):
            readline.read_history_file(history)

    def read(self) -> str | None:
        """Returns the next message; None at Ctrl-D, or at Ctrl-C with nothing typed.

        Ctrl-C with something typed drops that.
        """
        while True:
            try:
                line = input(PROMPT)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                if readline.get_line_buffer():
                    continue
                return None
            try:
                return self._whole(line)
            except (EOFError, KeyboardInterrupt):
                print()

    def save(self) -> None:
        """Keeps the history, for this user alone. Without a place for it, it is forgotten."""
        with suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)

    def _whole(self, line: str) -> str:
        """Returns the message that begins with ``line``."""
        if line.lstrip().startswith(BLOCK):
            lines = [line.lstrip().removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(input(MORE))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        else:
            lines = [line]
            while not COMMAND.fullmatch(line) and select.select([sys.stdin], [], [], _PASTE_S)[0]:
                lines.append(input(MORE))
        return "\n".join(lines).strip()


@contextmanager
def keys_not_shown() -> Iterator[None]:
    """Keeps what is typed within the block from being shown. It is read at the next prompt."""
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
