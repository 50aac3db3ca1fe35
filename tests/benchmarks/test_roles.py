"""``benchmarks roles`` as a person runs it, and what it counts as good."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.roles.benchmark import arrivals
from benchmarks.roles.pace import Pace
from benchmarks.settings import RolesBenchConfig
from pdserve.bench.report import read_report
from tests.benchmarks.studies import run_study


def test_a_step_takes_the_time_of_its_parts() -> None:
    assert Pace(0.006, 0.002, 0.0005).seconds(3, 100) == pytest.approx(0.062)


def test_phases_take_turns_and_are_always_the_same() -> None:
    config = RolesBenchConfig(cycles=2, phase_s=50.0)
    planned = arrivals(config)
    assert planned == arrivals(config)
    assert all(earlier.at_s < later.at_s for earlier, later in pairwise(planned))
    for arrival in planned:
        shape = (len(arrival.job.prompt), arrival.job.output_tokens)
        assert shape == ((1024, 16) if arrival.at_s // 50 % 2 == 0 else (64, 128))
    assert planned[-1].at_s < 200
    counts = [sum(arrival.at_s // 50 == phase for arrival in planned) for phase in range(4)]
    assert all(30 < count < 85 for count in counts[::2])
    assert all(40 < count < 95 for count in counts[1::2])


# In `make test`, tests/cluster/test_role_switch.py shows that roles change under load, and
# tests/proxy/test_role_decider.py when.
@pytest.mark.integration
@pytest.mark.nightly
def test_a_cluster_of_paced_nodes_answers_all_requests(demo_model: Path, tmp_path: Path) -> None:
    """The load of one second moves no node: here only the benchmark itself is tested."""
    flags = ("--splits", "auto", "--phase-s", "1", "--json", "figures.json")
    done = run_study("roles", *flags, folder=tmp_path, timeout_s=240)
    (row,) = read_report(tmp_path / "figures.json").rows_of("roles")
    assert row.at["split"] == "auto"
    assert row.figure("requests").value > 0
    assert row.figure("failed").value == 0, done.stderr
