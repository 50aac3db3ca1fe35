"""``make install`` says in a sentence what a machine lacks, before it makes anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_packages import ROOT

WITHOUT_VENV = '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n'
"""Debian's Python, without its package for virtual environments."""


def made(folder: Path, python: str, path: str) -> subprocess.CompletedProcess[str]:
    make = shutil.which("make")
    if make is None:
        pytest.skip("this machine has no make")
    command = [make, "install", f"VENV={folder / 'environment'}", f"PYTHON={python}"]
    return subprocess.run(command, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, timeout=60)


def test_a_python_without_virtual_environments_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(WITHOUT_VENV)
    python.chmod(0o755)
    done = made(tmp_path, str(python), "/usr/bin:/bin")
    assert done.returncode != 0
    wanted = f"{python} cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
    assert done.stdout.splitlines() == [wanted]
    assert not (tmp_path / "environment").exists()


def test_a_missing_compiler_is_told(tmp_path: Path) -> None:
    done = made(tmp_path, sys.executable, str(tmp_path))
    assert done.returncode != 0
    assert done.stdout.splitlines() == ["g++ is needed, which compiles kernels; on Debian and Ubuntu: apt install g++"]
    assert not (tmp_path / "environment").exists()
