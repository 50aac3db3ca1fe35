"""Runs a tool that is a command of its own environment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMAND_TIMEOUT_S = 600.0
SHOWN = 900


def run_command(folder: Path, name: str, *args: str) -> str:
    """Runs a command in ``folder``, where it may leave files, and returns what it says.

    Raises AssertionError, with the end of that, if the command fails.
    """
    argv: Sequence[str] = (str(Path(sys.executable).parent / name), *args)
    done = subprocess.run(
        argv,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMMAND_TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    print(said, file=sys.stderr)
    assert done.returncode == 0, f"exit status {done.returncode}: {said[-SHOWN:]}"
    return said
