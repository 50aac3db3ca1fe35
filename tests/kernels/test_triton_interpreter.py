"""Runs the tests of ``tests/kernels/triton`` on a CPU, in a process that has not imported triton before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

FOLDER = Path(__file__).parent / "triton"


TIMEOUT_S = 900
"""This is many times what the tests take: only a run that hangs should end here, even on a busy machine."""


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(
    "which",
    [
        pytest.param(("-m", "not nightly"), id="few"),
        pytest.param(("--hypothesis-profile=many",), id="all", marks=pytest.mark.nightly),
    ],
)
def test_triton_kernels_in_the_interpreter(which: tuple[str, ...]) -> None:
    """In every run, tests try all examples that they name, and what differs in a branch of a program."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider", *which],
        env=environment,
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]
