"""``benchmarks failover`` as a person runs it: decode nodes die, hang or drain, and no answer changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.bench.report import read_report
from tests.benchmarks.studies import run_study

# tests/faults/test_failover.py and test_drain.py show in `make test` that answers go on as they were.
pytestmark = [pytest.mark.integration, pytest.mark.nightly]

# In bf16, the default: its compiled kernels give the same bits in every batch.
SMALL = ("--clients", "3", "--prompt-tokens", "40", "--output-tokens", "160", "--kv-cache-mib", "64")

# Nodes start slowly where other tests run.
STARTS_S, ROUND_S = 160, 35


@pytest.mark.parametrize(
    ("rounds", "faults"),
    [(2, "kill,drain"), pytest.param(200, "kill,hang", marks=pytest.mark.timeout(7200))],
    ids=["few", "many"],
)
def test_streams_go_on_whatever_happens_to_their_nodes(
    slow_tiny_model: Path, tmp_path: Path, rounds: int, faults: str
) -> None:
    model = ("--model", str(slow_tiny_model), "--prompt-vocab", "400")
    flags = ("--rounds", str(rounds), "--faults", faults, *model, *SMALL, "--json", "figures.json")
    done = run_study("failover", *flags, folder=tmp_path, timeout_s=STARTS_S + ROUND_S * rounds)
    rows = {str(row.at["fault"]): row for row in read_report(tmp_path / "figures.json").rows_of("failover")}
    assert set(rows) == set(faults.split(","))
    for row in rows.values():
        assert row.figure("faults").value == rounds / len(rows)
        assert row.figure("resumed").value > 0, done.stderr
        assert (row.figure("wrong").value, row.figure("lost").value) == (0, 0), done.stderr


@pytest.mark.timeout(STARTS_S + ROUND_S * 8 + 40)
def test_streams_go_on_from_nodes_that_draft_to_one_that_does_not_and_back(demo_model: Path, tmp_path: Path) -> None:
    """The demo model's answers to random prompts repeat themselves, so that drafts are accepted."""
    nodes = ("--rounds", "8", "--faults", "kill", "--decode", "2", "--plain", "1")
    flags = ("--model", str(demo_model), *SMALL, "--json", "figures.json")
    done = run_study("failover", *nodes, *flags, folder=tmp_path, timeout_s=STARTS_S + ROUND_S * 8)
    (row,) = read_report(tmp_path / "figures.json").rows_of("failover")
    assert row.figure("resumed").value > 0, done.stderr
    assert row.figure("accepted drafts").value > 0, done.stderr
    assert (row.figure("wrong").value, row.figure("lost").value) == (0, 0), done.stderr
