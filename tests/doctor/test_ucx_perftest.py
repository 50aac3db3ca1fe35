"""Tests pdserve.doctor.ucx: it runs the installed program for a moment and reads its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.doctor.ucx import Perftest, PerftestKind, PerftestResult, find_perftest, parse_result
from pdserve.errors import BenchError
from pdserve_kvtransfer.ucx.ucx_library import loaded_ucx

pytestmark = pytest.mark.integration

SIZE, COUNT = 65_536, 200


def _installed() -> Perftest:
    loaded = loaded_ucx()
    found = find_perftest(loaded.prefix, loaded.folder)
    assert found is not None, "libucx, which pdserve depends on, brings ucx_perftest"
    return found


@pytest.mark.parametrize("kind", PerftestKind)
def test_it_measures_between_two_processes(kind: PerftestKind) -> None:
    environ = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    result = _installed().pair(environ, kind=kind, size=SIZE, count=COUNT, timeout_s=60)
    assert result.microseconds > 0
    if kind is PerftestKind.BANDWIDTH:
        assert result.bytes_per_s == pytest.approx(SIZE / result.microseconds * 1e6, rel=0.05)


def test_a_run_that_cannot_be_is_an_error() -> None:
    with pytest.raises(BenchError):
        _installed().pair(
            {"UCX_TLS": "nonsense"}, kind=PerftestKind.BANDWIDTH, size=SIZE, count=COUNT, timeout_s=30, cores=(0, 0)
        )


def test_a_program_that_ends_at_once_is_an_error() -> None:
    broken = Perftest(Path("/bin/false"), Path("/"))
    with pytest.raises(BenchError, match="ended with status 1"):
        broken.pair({}, kind=PerftestKind.BANDWIDTH, size=SIZE, count=COUNT, timeout_s=30)


def test_its_csv_is_read_in_bytes_and_microseconds() -> None:
    header = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n"
    assert parse_result(header + "1000,25.2,84.5,84.6,4158.6,4000.0,11829,11829\n") == PerftestResult(
        84.6, 4000 * 2**20
    )


@pytest.mark.parametrize("output", ["", "iterations\n", "1,2\n"])
def test_other_output_is_an_error(output: str) -> None:
    with pytest.raises(BenchError, match="not understood"):
        parse_result(output)
