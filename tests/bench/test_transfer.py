"""Tests ``pdserve bench transfer``: real transfers between two processes, and the figures computed from them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pdserve.bench.report import changes, read_report
from pdserve.bench.transfer.benchmark import (
    MeanStep,
    Moves,
    ReturnTimes,
    StepTimes,
    checksum_row,
    decode_row,
    return_row,
)
from pdserve.bench.transfer.yardsticks import nixl_rates
from pdserve.cli.bench import two_cores
from pdserve.cli.main import main
from pdserve.config import Switch
from pdserve.engine.kv_connector.kv_return import RETURNS_PER_S
from pdserve.errors import BenchError
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.integration

NIXL = "print('nixl 8192 16 2.00 GB/s total, 3.50 xfer-only; 4.0 us/blk')"
SMALL = ("--block-kib", "8", "--fetch-mib", "1", "--repeats", "1", "--decode-s", "1.6", "--decode-context", "32")


def test_a_run_measures_all_and_can_be_compared(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "tiny")
    script = tmp_path / "nixl.py"
    script.write_text(NIXL)
    file = tmp_path / "figures.json"
    flags = ("--model", str(model), "--json", str(file), "--nixl-command", f"{sys.executable} {script}")
    cores = os.sched_getaffinity(0)
    try:
        # The benchmark pins its process to cores, and here it runs in the tests' process.
        assert main(["bench", "transfer", *SMALL, *flags, "--prefill-tokens-per-s", "100000"], dict(os.environ)) == 0
    finally:
        os.sched_setaffinity(0, cores)
    report = read_report(file)
    assert [row.at["checksums"] for row in report.rows_of("transfer")] == ["on", "off"]
    for row in report.rows_of("transfer"):
        engine = row.figure("engine").value
        assert row.figure("engine : NIXL").value == pytest.approx(engine / 2.0)
        assert row.figure("engine : ucx_perftest").value == pytest.approx(engine / row.figure("ucx_perftest").value)
        assert row.figure("receive CPU/block").value > 0
        assert row.figure("send CPU/block").value > 0
    states = report.rows_of("transfer of a state")
    assert [(row.at["state"], row.at["checksums"]) for row in states[:3]] == [
        ("1 MiB", "on"),
        ("1 MiB", "off"),
        ("16 MiB", "on"),
    ]
    assert all(row.figure("engine").value > 0 for row in states)
    (windows,) = report.rows_of("transfer of a prompt with windows")
    assert windows.figure("window only : all blocks").value > 0
    (fp8,) = report.rows_of("transfer of a prompt in FP8")
    assert fp8.figure("FP8 : bf16").value > 0
    (latents,) = report.rows_of("transfer of a prompt with latents")
    assert latents.figure("latents : all heads").value > 0
    (fp8,) = report.rows_of("transfer of a prompt with latents in FP8")
    assert fp8.figure("FP8 : bf16").value > 0
    assert len(report.rows_of("overhead of a block")) == 1
    assert [row.figure("received").value > 0 for row in report.rows_of("decode step while KV blocks come in")] == [
        True,
        True,
    ]
    (returns,) = report.rows_of("decode step while blocks return")
    assert returns.figure("returns in a second").value > 0
    assert returns.figure("CPU returning : alone").value > 0
    assert not any(change.worse for change in changes(report, report, 0.1))


def moves(seconds: tuple[float, ...], receive_cpu_s: float) -> Moves:
    return Moves(1024, 10, seconds, receive_cpu_s, 2e-6)


def test_checksums_are_weighed_against_the_prefill_of_their_block() -> None:
    moved = {Switch.ON: moves((2.0, 3.0, 9.0), 5e-6), Switch.OFF: moves((1.0, 2.0, 3.0), 3e-6)}
    row = checksum_row(moved, prefill_s=2e-4)
    assert row.figure("with : without").value == pytest.approx(1.5)
    assert row.figure("both CPUs added : prefill of a block").value == pytest.approx(0.01)


def test_a_slowdown_is_told_for_each_gigabyte() -> None:
    row = decode_row("tiny", 8, None, StepTimes(0.010, 0.011, 2e9))
    assert row.figure("receiving : alone").value == pytest.approx(1.1)
    assert row.figure("added for 1 GB/s").value == pytest.approx(0.05)


def test_each_turn_with_returns_is_weighed_against_the_one_before_it() -> None:
    alone = (MeanStep(0.010, 0.008), MeanStep(0.100, 0.080), MeanStep(0.010, 0.008))
    returning = (MeanStep(0.011, 0.0082), MeanStep(0.110, 0.082), MeanStep(0.050, 0.040))
    row = return_row("tiny", 8, ReturnTimes(alone, returning, 10.0, 0.002))
    assert row.figure("returning : alone").value == pytest.approx(1.1)
    assert row.figure("CPU returning : alone").value == pytest.approx(1.025)
    assert row.figure("all returns' share of a core").value == pytest.approx(0.002 * RETURNS_PER_S)


def test_one_core_serves_both_engines_where_there_is_no_other() -> None:
    assert two_cores([3, 5, 7]) == (3, 5)
    assert two_cores([3]) == (3, 3)


@pytest.mark.parametrize(
    ("command", "message"),
    [("/nowhere/nixl", "cannot be run"), ("'", "cannot be run"), ("true", "printed no rate")],
)
def test_a_nixl_command_that_measures_nothing_is_an_error(command: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        nixl_rates(command, {"PATH": os.environ["PATH"]})
