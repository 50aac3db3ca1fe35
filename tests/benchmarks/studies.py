"""Runs studies as a person does, in a folder of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.programs import study_program
from tests.processes import clean_environ


def run_study(*words: str, folder: Path, timeout_s: float, **environ: str) -> subprocess.CompletedProcess[str]:
    """Returns the ended ``python -m benchmarks``, with what it has printed. Fails the test if it has failed."""
    done = subprocess.run(
        study_program("benchmarks", *words),
        cwd=folder,
        env=clean_environ(XDG_STATE_HOME=str(folder), **environ),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
