"""Tests how the doctor reads UCX's own list of transports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config import TransferConfig
from pdserve.doctor.finding import Finding, Verdict
from pdserve.doctor.ucx import UcxFacts, check_tools, check_ucx, parse_transports, read_tools, read_ucx
from pdserve_kvtransfer.ucx.ucx_library import Lane, LoadedUcx, loaded_ucx, parse_resources

LAPTOP = UcxFacts(
    tls="",
    usable=(Lane("self", "memory"), Lane("tcp", "eth0"), Lane("tcp", "lo"), Lane("posix", "memory")),
    error="",
    all_transports=frozenset({"self", "tcp", "posix", "sysv", "cma"}),
    loaded=LoadedUcx("1.21.0", Path("/site-packages/libucx/lib"), packaged=True, no_verbs="there is no libuct_ib.so"),
    rdma_devices=(),
    gpus=0,
)
WITH_VERBS = LoadedUcx("1.21.0", Path("/opt/ucx/lib"), packaged=False)
INFO = """
# Memory domain: tcp
#      Transport: tcp
#         Device: eth0
#           Type: network
#      Transport: posix
#         Device: memory
"""
CONTEXT = """#
# UCP context
#     component 1  :  tcp
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
"""


def finding(facts: UcxFacts, check: str) -> Finding:
    (found,) = [finding for finding in check_ucx(facts) if finding.check == check]
    return found


def test_ucx_info_is_understood() -> None:
    assert parse_transports(INFO) == {"tcp", "posix"}
    assert parse_resources(CONTEXT) == (Lane("self", "memory"), Lane("tcp", "eth0"))


@pytest.mark.integration
def test_this_machines_ucx_is_understood() -> None:
    tools = read_tools(loaded_ucx())
    assert tools is not None and check_tools(tools).verdict is Verdict.OK
    transports = parse_transports(tools.ask({}, "", "-d"))
    usable, error = read_ucx(TransferConfig())
    assert not error
    assert {lane.transport for lane in usable} <= transports
    assert {"tcp", "posix"} <= transports
    assert tools.ask({}, "", "--no-such-flag") == ""


def test_transports_that_are_not_there_are_a_problem() -> None:
    usable, error = read_ucx(TransferConfig(ucx_tls="nonsense"))
    assert usable == ()
    (found,) = check_ucx(replace(LAPTOP, tls="nonsense", usable=usable, error=error))
    assert found.verdict is Verdict.PROBLEM and "nonsense" in found.seen and "--ucx-tls" in found.advice


def test_no_tools_are_a_warning() -> None:
    assert check_tools(None).verdict is Verdict.WARNING


def test_a_laptop_is_fine() -> None:
    assert {found.verdict for found in check_ucx(LAPTOP)} == {Verdict.OK, Verdict.NOT_APPLICABLE}
    assert finding(LAPTOP, "UCX transports").seen == "tcp (eth0, lo), posix"
    assert finding(LAPTOP, "networks for KV").seen == "tcp on eth0; whoever reaches UCX there can end a node"


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "advice"),
    [
        (
            replace(LAPTOP, tls="tcp", usable=(Lane("tcp", "eth0"),)),
            "shared memory",
            Verdict.WARNING,
            "add sm to --ucx-tls, which is tcp",
        ),
        (replace(LAPTOP, usable=(Lane("tcp", "eth0"),)), "shared memory", Verdict.WARNING, "/dev/shm"),
        (
            replace(LAPTOP, tls="sm", usable=(Lane("posix", "memory"),)),
            "networks for KV",
            Verdict.WARNING,
            "add tcp to --ucx-tls",
        ),
        (replace(LAPTOP, tls="tcp,infinity"), "UCX_TLS", Verdict.WARNING, "leave it empty"),
        (
            replace(LAPTOP, rdma_devices=("mlx5_0",)),
            "RDMA in UCX",
            Verdict.PROBLEM,
            "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY",
        ),
        (
            replace(LAPTOP, rdma_devices=("mlx5_0",), loaded=WITH_VERBS),
            "RDMA in UCX",
            Verdict.PROBLEM,
            "UCX_NET_DEVICES",
        ),
        (replace(LAPTOP, gpus=1), "CUDA in UCX", Verdict.WARNING, "libcuda"),
    ],
    ids=["tcp-only", "no-memory", "no-network", "unknown", "no-verbs", "rdma-unused", "no-cuda"],
)
def test_what_is_missing_is_said_with_what_to_do(facts: UcxFacts, check: str, verdict: Verdict, advice: str) -> None:
    found = finding(facts, check)
    assert found.verdict is verdict
    assert advice in found.advice


def test_rdma_and_cuda_are_found() -> None:
    rack = replace(
        LAPTOP,
        usable=(*LAPTOP.usable, Lane("rc_mlx5", "mlx5_0:1"), Lane("cuda_copy", "cuda"), Lane("cuda_ipc", "cuda")),
        rdma_devices=("mlx5_0",),
        gpus=8,
        tls="all,^cma",
    )
    assert finding(rack, "RDMA in UCX").seen == "rc_mlx5 on mlx5_0:1"
    assert finding(rack, "CUDA in UCX").seen == "cuda_copy, cuda_ipc"
    assert finding(rack, "UCX_TLS").verdict is Verdict.OK
    assert "cuda" not in finding(rack, "networks for KV").seen
