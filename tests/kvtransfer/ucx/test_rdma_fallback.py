"""Tests which reason is given for blocks that go over TCP on a machine with RDMA devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.wire.discovery import TransportKind
from pdserve_kvtransfer.ucx.rdma_ports import RdmaPort, why_no_rdma
from pdserve_kvtransfer.ucx.ucx_library import Lane, LoadedUcx

UP = RdmaPort("mlx5_0", 1, "4: ACTIVE", "5: LinkUp", "100 Gb/sec", "InfiniBand", (), 0)
DOWN = replace(UP, device="mlx5_1", state="1: DOWN")
WITH_VERBS = LoadedUcx("1.21.0", Path("/opt/ucx/lib"), packaged=False)
PACKAGE = replace(WITH_VERBS, packaged=True, no_verbs="there is no libuct_ib.so")
ETHERNET = (Lane("tcp", "eth0"), Lane("posix", "memory"))


@pytest.mark.parametrize(
    ("ports", "resources", "loaded", "tls", "devices", "reason"),
    [
        ([], ETHERNET, PACKAGE, "", "", ""),
        (
            [UP],
            ETHERNET,
            PACKAGE,
            "",
            "",
            "without verbs (there is no libuct_ib.so) does not know mlx5_0 port 1",
        ),
        (
            [UP],
            (*ETHERNET, Lane("rc_mlx5", "mlx5_0:1")),
            WITH_VERBS,
            "",
            "",
            "this side has rc_mlx5 on mlx5_0:1",
        ),
        ([DOWN], ETHERNET, WITH_VERBS, "", "", "no RDMA port is active: mlx5_1 port 1 (1: DOWN)"),
        ([UP, DOWN], ETHERNET, WITH_VERBS, "tcp,sm", "", "UCX may use tcp,sm alone: see --ucx-tls"),
        ([UP], ETHERNET, WITH_VERBS, "^ib,cuda_ipc", "", "UCX may use ^ib,cuda_ipc alone"),
        ([UP], ETHERNET, WITH_VERBS, "^cuda_ipc", "eth0", "UCX may use eth0 alone, and no RDMA device"),
        ([UP], ETHERNET, WITH_VERBS, "rc_x,sm", "", "UCX opens none of mlx5_0 port 1 (4: ACTIVE): see ulimit -l"),
        ([UP], ETHERNET, WITH_VERBS, "all", "", "UCX opens none of mlx5_0 port 1"),
    ],
    ids=["no device", "no verbs", "peer", "down", "tls", "excluded", "devices", "unusable", "all"],
)
def test_the_first_cause_that_this_side_can_see_is_named(
    ports: list[RdmaPort], resources: tuple[Lane, ...], loaded: LoadedUcx, tls: str, devices: str, reason: str
) -> None:
    found = why_no_rdma(ports, resources, loaded, tls, devices)
    assert reason in found and bool(found) is bool(reason)


@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("rc_mlx5", TransportKind.RDMA),
        ("ud_verbs", TransportKind.RDMA),
        ("dc_mlx5", TransportKind.RDMA),
        ("posix", TransportKind.SHARED_MEMORY),
        ("tcp", TransportKind.TCP),
        ("cuda_copy", TransportKind.OTHER),
    ],
)
def test_transports_are_of_a_kind(transport: str, kind: TransportKind) -> None:
    assert Lane(transport, "any").kind is kind
