"""Checks the RDMA ports that the kernel shows below ``/sys/class/infiniband``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning

_INFINIBAND = "class/infiniband"
_NETWORKS = "class/net"
_ROCE_V2 = "RoCE v2"
_ETHERNET = "Ethernet"
_ROCE_HEADERS = 76
"""The least number of bytes of an Ethernet frame's payload that RoCE needs beside the RDMA MTU."""
_MTUS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Gid:
    index: int
    gid: str
    kind: str
    """The GID's type: ``IB/RoCE v1`` or ``RoCE v2``."""
    net_device: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of one device. Its texts are the kernel's, and empty where the kernel does not say."""

    device: str
    port: int
    state: str
    """The logical state, such as ``4: ACTIVE``."""
    phys_state: str
    """The physical state, such as ``5: LinkUp``."""
    rate: str
    link_layer: str
    gids: tuple[Gid, ...]
    net_mtu: int
    """The MTU of the network device that the port belongs to; 0 if it is unknown."""

    @property
    def name(self) -> str:
        return f"{self.device} port {self.port}"


def read_rdma(sys: Path = Path("/sys")) -> list[RdmaPort]:
    """Returns every port, in order; none where there is no RDMA."""
    folders = sorted((sys / _INFINIBAND).glob("*/ports/*"), key=lambda folder: (folder.parts[-3], int(folder.name)))
    return [_port(sys, folder) for folder in folders]


def _port(sys: Path, folder: Path) -> RdmaPort:
    gids = _gids(folder)
    device = folder.parts[-3]
    networks = {gid.net_device for gid in gids if gid.net_device}
    networks |= {found.name for found in (sys / _INFINIBAND / device / "device" / "net").glob("*")}
    mtus = [int(text) for name in networks if (text := _text(sys / _NETWORKS / name / "mtu")).isdecimal()]
    return RdmaPort(
        device=device,
        port=int(folder.name),
        state=_text(folder / "state"),
        phys_state=_text(folder / "phys_state"),
        rate=_text(folder / "rate"),
        link_layer=_text(folder / "link_layer"),
        gids=gids,
        net_mtu=min(mtus, default=0),
    )


def _gids(folder: Path) -> tuple[Gid, ...]:
    found = []
    for file in sorted((folder / "gids").glob("*"), key=lambda file: int(file.name)):
        gid = _text(file)
        if gid.strip("0:"):
            attributes = folder / "gid_attrs"
            kind, network = _text(attributes / "types" / file.name), _text(attributes / "ndevs" / file.name)
            found.append(Gid(int(file.name), gid, kind, network))
    return tuple(found)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        # An empty GID has no attributes, and some drivers leave files out.
        return ""


def check_rdma(ports: list[RdmaPort]) -> list[Finding]:
    if not ports:
        return [not_applicable("RDMA ports", "this machine has no RDMA device")]
    return [finding for port in ports for finding in _check_port(port)]


def _check_port(port: RdmaPort) -> list[Finding]:
    check = f"RDMA {port.name}"
    seen = ", ".join(part for part in (port.link_layer, port.state, port.phys_state, port.rate) if part)
    if not port.state.endswith("ACTIVE"):
        advice = "see the cable and the switch's port" if port.link_layer == _ETHERNET else "see the subnet manager"
        return [problem(check, seen, f"{advice}; ip link set DEV up; or keep UCX off it with UCX_NET_DEVICES")]
    findings = [ok(check, seen)]
    if port.link_layer == _ETHERNET:
        findings += [_gid(port), _mtu(port)]
    return findings


def _gid(port: RdmaPort) -> Finding:
    check = f"GID {port.name}"
    routable = [gid for gid in port.gids if gid.kind == _ROCE_V2 and not gid.gid.lower().startswith("fe80")]
    if routable:
        best = routable[0]
        return ok(check, f"index {best.index}, RoCE v2, {best.gid} on {best.net_device or 'an unnamed device'}")
    local = [gid for gid in port.gids if gid.kind == _ROCE_V2]
    if local:
        return warning(
            check,
            f"RoCE v2 only with the link-local {local[0].gid} (index {local[0].index})",
            "give the interface an IP address: without one, only hosts of the same subnet can be reached",
        )
    return problem(
        check,
        f"no RoCE v2 GID among {len(port.gids)}",
        "give the interface an IP address, and see that the device speaks RoCE v2 (cma_roce_mode)",
    )


def _mtu(port: RdmaPort) -> Finding:
    check = f"MTU {port.name}"
    if not port.net_mtu:
        return not_applicable(check, "its network device is not known")
    fitting = [mtu for mtu in _MTUS if mtu + _ROCE_HEADERS <= port.net_mtu]
    active = fitting[-1] if fitting else 0
    seen = f"{port.net_mtu} on the network device leaves {active} for RDMA"
    if active < _MTUS[-1]:
        return warning(check, seen, "ip link set DEV mtu 9000 here, on every peer and on the switch")
    return ok(check, seen)
