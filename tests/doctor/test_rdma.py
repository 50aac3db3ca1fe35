"""Tests RDMA ports with made-up ``/sys`` files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.doctor.finding import Finding, Verdict
from pdserve.doctor.ucx import check_rdma
from pdserve_kvtransfer.ucx.rdma_ports import read_rdma

IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0007"
LINK_LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
ROCE: dict[str, str] = {
    "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
    "class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)",
    "class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
    "class/infiniband/mlx5_0/ports/1/gids/0": LINK_LOCAL,
    "class/infiniband/mlx5_0/ports/1/gids/3": IPV4,
    "class/infiniband/mlx5_0/ports/1/gids/10": EMPTY,
    "class/infiniband/mlx5_0/ports/1/gid_attrs/types/0": "IB/RoCE v1",
    "class/infiniband/mlx5_0/ports/1/gid_attrs/types/3": "RoCE v2",
    "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3": "eth2",
    "class/net/eth2/mtu": "9000",
}


def sysfs(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def findings(root: Path, **changed: str) -> dict[str, Finding]:
    """Returns the findings of the RoCE port. ``changed`` replaces files, which it names by the end of their paths."""
    files = {
        name: next((text for end, text in changed.items() if name.endswith(end.replace("__", "/"))), text)
        for name, text in ROCE.items()
    }
    return {found.check.split()[0]: found for found in check_rdma(read_rdma(sysfs(root, files)))}


def test_no_rdma_is_not_applicable(tmp_path: Path) -> None:
    assert [found.verdict for found in check_rdma(read_rdma(tmp_path))] == [Verdict.NOT_APPLICABLE]


def test_a_good_port(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(["RDMA", "GID", "MTU"], Verdict.OK)
    assert "index 3, RoCE v2" in found["GID"].seen and "eth2" in found["GID"].seen
    assert "9000 on the network device leaves 4096" in found["MTU"].seen
    assert "100 Gb/sec" in found["RDMA"].seen


def test_a_port_that_is_down(tmp_path: Path) -> None:
    found = findings(tmp_path, state="1: DOWN")
    assert found["RDMA"].verdict is Verdict.PROBLEM
    assert "cable" in found["RDMA"].advice
    assert set(found) == {"RDMA"}, "nothing else matters then"


def test_a_small_mtu(tmp_path: Path) -> None:
    found = findings(tmp_path, mtu="1500")["MTU"]
    assert found.verdict is Verdict.WARNING
    assert "leaves 1024" in found.seen and "9000" in found.advice


@pytest.mark.parametrize(
    ("changed", "verdict", "advice"),
    [
        ({"types__3": "IB/RoCE v1"}, Verdict.PROBLEM, "cma_roce_mode"),
        ({"gids__3": LINK_LOCAL}, Verdict.WARNING, "IP address"),
        ({"gids__3": EMPTY}, Verdict.PROBLEM, "IP address"),
    ],
    ids=["v1", "link-local", "empty"],
)
def test_no_good_gid(tmp_path: Path, changed: dict[str, str], verdict: Verdict, advice: str) -> None:
    found = findings(tmp_path, **changed)["GID"]
    assert found.verdict is verdict
    assert advice in found.advice


def test_infiniband_has_no_gid_or_mtu_of_a_network_device(tmp_path: Path) -> None:
    assert set(findings(tmp_path, link_layer="InfiniBand")) == {"RDMA"}


def test_several_ports_in_order(tmp_path: Path) -> None:
    port = {name.removeprefix("class/infiniband/mlx5_0/ports/1/"): text for name, text in ROCE.items()}
    del port["class/net/eth2/mtu"]
    ports = [("mlx5_0", 2), ("mlx5_0", 10), ("mlx5_1", 1)]
    for device, number in ports:
        sysfs(tmp_path / f"class/infiniband/{device}/ports/{number}", port)
    found = read_rdma(tmp_path)
    assert [(one.device, one.port) for one in found] == ports
    mtus = [one for one in check_rdma(found) if one.check.startswith("MTU")]
    assert [one.verdict for one in mtus] == [Verdict.NOT_APPLICABLE] * 3, "the MTU is not known"
