"""Tests the limits of shared memory, locked memory and descriptors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.doctor.finding import Verdict
from pdserve.doctor.machine import LimitFacts, check_limits, read_limits

FINE = LimitFacts(shm_total=2**34, shm_free=2**33, locked=-1, descriptors=65_536, descriptors_hard=-1)


def test_all_is_fine() -> None:
    assert {found.verdict for found in check_limits(FINE, rdma=True)} == {Verdict.OK}


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "advice"),
    [
        (replace(FINE, shm_total=0), "shared memory space", Verdict.PROBLEM, "tmpfs"),
        (replace(FINE, shm_total=2**26, shm_free=2**26), "shared memory space", Verdict.WARNING, "--shm-size"),
        (replace(FINE, shm_free=2**20), "shared memory space", Verdict.WARNING, "--shm-size"),
        (replace(FINE, locked=2**23), "locked memory", Verdict.PROBLEM, "ulimit -l"),
        (replace(FINE, descriptors=1024, descriptors_hard=4096), "open files", Verdict.WARNING, "4096"),
    ],
)
def test_too_little_is_said_with_what_to_do(facts: LimitFacts, check: str, verdict: Verdict, advice: str) -> None:
    (found,) = [found for found in check_limits(facts, rdma=True) if found.check == check]
    assert found.verdict is verdict
    assert advice in found.advice


def test_locked_memory_matters_with_rdma_only() -> None:
    verdicts = {found.verdict for found in check_limits(replace(FINE, locked=2**16), rdma=False)}
    assert verdicts == {Verdict.OK, Verdict.NOT_APPLICABLE}


def test_this_machine_is_read(tmp_path: Path) -> None:
    assert read_limits(tmp_path).shm_total >= read_limits(tmp_path).shm_free > 0
    assert read_limits(tmp_path / "none").shm_total == 0
