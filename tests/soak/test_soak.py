"""Three minutes of ``make soak``: a real cluster under load and faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.soak.report import verdict
from tests.soak.run import SoakPlan, run_soak

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


@pytest.mark.timeout(900)
def test_three_minutes_of_load_and_faults_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    soak = asyncio.run(run_soak(SoakPlan(minutes=3.0, fault_pause_s=5.0, rest_every_s=30.0), tmp_path))
    assert [line.text for line in verdict(soak) if not line.ok] == []
    assert len(soak.strikes) > 10
