"""Runs the programs of ``examples/`` as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.processes import clean_environ

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 240.0


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns what the program ``name`` wrote. Fails the test if it does not end well, with all that it wrote."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=clean_environ(), text=True, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done
