"""Runs ``benchmarks stream`` as a user does, with real processes and the mock engine, and checks every answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stream.figures import GAIN, NODE_COST
from benchmarks.stream.variants import OFF, ON
from pdserve.bench.report import Report, read_report
from tests.benchmarks.studies import run_study

# The other modules of this folder show in `make test` what its engine, its clients and its figures do.
pytestmark = [pytest.mark.integration, pytest.mark.nightly]

RUN = ("--streams", "8", "--variants", "off,on,on-interval", "--seconds", "0.3", "--rate", "800")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Report:
    folder = tmp_path_factory.mktemp("bench-stream")
    files = ("--json", "figures.json", "--plot", "plot.png")
    # The benchmark ignores settings for the user's own node and proxy.
    done = run_study(
        "stream",
        "--model",
        str(demo_model),
        *RUN,
        *files,
        folder=folder,
        timeout_s=240,
        PDSERVE_STREAM_INTERVAL="3",
        PDSERVE_API_KEY="k" * 40,
        PDSERVE_HOST="192.0.2.1",
    )
    assert "saturated, 8 streams, on-interval" in done.stderr
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    return read_report(folder / "figures.json")


def test_every_variant_runs_in_both_regimes(measured: Report) -> None:
    for regime in ("paced", "saturated"):
        rows = measured.rows_of(regime)
        assert [row.at["variant"] for row in rows] == [OFF, ON, "on-interval"]
        for row in rows:
            for name in ("TTFT p50", "TPOT p99", "gap p99", "steady output", "node peak", "proxy peak"):
                assert row.figure(name).value > 0
    # The kernel counts in hundredths of a second, and a single run may take less than one.
    assert sum(row.figure(NODE_COST).value for row in measured.rows_of("saturated")) > 0


def test_the_interval_is_the_variants_and_merges_chunks(measured: Report) -> None:
    chunks = {row.at["variant"]: row.figure("tokens a chunk").value for row in measured.rows_of("paced")}
    assert chunks[ON] > 3
    assert chunks[OFF] < chunks[ON]


def test_gains_are_told(measured: Report) -> None:
    assert {(row.at["part"], row.at["others"]) for row in measured.rows_of(GAIN)} == {("all", OFF), ("interval", ON)}
