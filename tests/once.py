"""What the processes of one test run make once for all of them, such as a model's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

_LOCK_TIMEOUT_S = 240.0


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns a folder of this test run, which the first process that asks for ``name`` has filled with ``make``.

    Tests must leave it as it is.
    """
    base = folders.getbasetemp()
    # Each process of pytest -n has a folder of its own in that of the run.
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, draft = run / name, run / f"{name}.draft"
    with FileLock(run / f"{name}.lock", timeout=_LOCK_TIMEOUT_S):
        if not folder.exists():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            make(draft)
            draft.rename(folder)
    return folder
