"""Tests how the doctor judges a probe's figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.doctor.finding import Finding, Verdict
from pdserve.doctor.machine import LimitFacts
from pdserve.doctor.probe import ProbeFacts, check_probe, message_count, message_size, transports_of
from pdserve.doctor.ucx import Yardstick
from pdserve.wire.transfer import MAX_PROBE_BYTES, MAX_PROBE_MESSAGE_BYTES
from pdserve_kvtransfer.probe.examiner import Measured
from pdserve_kvtransfer.ucx.ucx_library import Lane

GB = 10**9
LIMITS = LimitFacts(shm_total=2**34, shm_free=2**33, locked=-1, descriptors=65_536, descriptors_hard=-1)
MEASURED = Measured(368_640, 364, 7.0 * GB, 20e-6, (Lane("posix", "memory"),))
HERE = ProbeFacts(
    peer="tcp://127.0.0.1:8200",
    measured=MEASURED,
    error="",
    yardstick=Yardstick("", 368_640, 10.0 * GB, 0.2e-6),
    same_machine=True,
    same_ipc_namespace=True,
    tls="",
    mbit_per_s=0,
)
OVER_TCP = replace(HERE, measured=replace(MEASURED, bytes_per_s=1.5 * GB, lanes=(Lane("tcp", "lo"),)))
RACK = replace(
    HERE,
    peer="tcp://10.0.0.7:8200",
    measured=replace(MEASURED, bytes_per_s=1.1 * GB, lanes=(Lane("tcp", "eth0"),)),
    yardstick=Yardstick("tcp", 368_640, 6.0 * GB, 4e-6),
    same_machine=False,
    mbit_per_s=10_000,
)


def findings(facts: ProbeFacts, limits: LimitFacts = LIMITS) -> dict[str, Finding]:
    return {found.check.split()[0]: found for found in check_probe(facts, limits)}


def test_a_good_probe_stands_beside_the_yardstick() -> None:
    found = findings(HERE)
    assert {one.verdict for one in found.values()} == {Verdict.OK}
    assert found["bandwidth"].seen == "7.00 GB/s in blocks of 360 KiB; ucx_perftest: 10.00 GB/s"
    assert found["latency"].seen == "20 µs one way, thread to thread; ucx_perftest: 0.20 µs"
    assert found["transport"].check == "transport 127.0.0.1:8200"
    assert "posix on memory" in found["transport"].seen


@pytest.mark.parametrize(
    ("facts", "limits", "advice"),
    [
        (replace(OVER_TCP, tls="tcp"), LIMITS, "add sm to --ucx-tls"),
        (replace(OVER_TCP, same_ipc_namespace=False), LIMITS, "--ipc=host"),
        (OVER_TCP, replace(LIMITS, shm_total=2**26), "--shm-size"),
        (OVER_TCP, LIMITS, "the other node"),
    ],
    ids=["tls", "namespace", "shm", "unknown"],
)
def test_tcp_on_one_machine_is_named_with_its_reason(facts: ProbeFacts, limits: LimitFacts, advice: str) -> None:
    found = findings(facts, limits)["transport"]
    assert found.verdict is Verdict.WARNING
    assert "although both are on one machine" in found.seen
    assert advice in found.advice


def test_far_below_the_yardstick_is_a_warning() -> None:
    found = findings(replace(HERE, measured=replace(MEASURED, bytes_per_s=1.0 * GB)))["bandwidth"]
    assert found.verdict is Verdict.WARNING and "--cores" in found.advice
    assert findings(replace(HERE, yardstick=None))["bandwidth"].verdict is Verdict.OK


def test_between_machines_the_interface_is_the_measure() -> None:
    assert {one.verdict for one in findings(RACK).values()} == {Verdict.OK}
    assert "ucx_perftest inside this machine by tcp" in findings(RACK)["bandwidth"].seen
    slow = findings(replace(RACK, mbit_per_s=100_000))["bandwidth"]
    assert slow.verdict is Verdict.WARNING and "the interface does 12.50 GB/s" in slow.seen


def test_a_long_way_is_a_warning() -> None:
    assert findings(replace(RACK, measured=replace(MEASURED, latency_s=0.03)))["latency"].verdict is Verdict.WARNING


def test_no_figure() -> None:
    failed = replace(HERE, measured=None, error="nothing came back over UCX")
    assert findings(failed)["probe"].verdict is Verdict.PROBLEM
    busy = replace(HERE, measured=None, error="another probe is under way")
    assert findings(busy)["probe"].verdict is Verdict.NOT_APPLICABLE
    few = replace(HERE, measured=replace(MEASURED, received=3, bytes_per_s=0.0))
    assert findings(few)["bandwidth"].verdict is Verdict.PROBLEM


@pytest.mark.parametrize("block_bytes", [1, 6 * 1024, 368_640, MAX_PROBE_MESSAGE_BYTES, 2**28])
@pytest.mark.parametrize("mib", [1, 128, 256])
def test_what_is_asked_for_is_within_the_protocols_bounds(block_bytes: int, mib: int) -> None:
    size = message_size(block_bytes)
    count = message_count(size, mib)
    assert 1 <= count <= 65_536 and size <= MAX_PROBE_MESSAGE_BYTES
    assert count * size <= MAX_PROBE_BYTES


def test_transports_as_ucx_takes_them() -> None:
    assert transports_of([Lane("tcp", "eth0"), Lane("tcp", "eth1"), Lane("rc_mlx5", "mlx5_0:1")]) == "tcp,rc_mlx5"
