"""Four minutes of ``make soak``: a real cluster under load and faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lab.soak.report import lives, verdict
from lab.soak.run import Soak, SoakPlan, run_soak

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


@pytest.mark.timeout(900)
def test_four_minutes_of_load_and_faults_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    soak = Soak(SoakPlan(minutes=4.0, fault_pause_s=5.0, rest_every_s=15.0))
    asyncio.run(run_soak(soak, tmp_path))
    assert [line.text for line in verdict(soak) if not line.ok] == []
    assert lives(soak), "no process was judged"
    assert len(soak.strikes) > 10
