"""The RDMA ports that the kernel shows below ``/sys/class/infiniband``, and why blocks do not go through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.wire.discovery import TransportKind
from pdserve_kvtransfer.ucx.ucx_library import RDMA_FAMILIES, Lane, LoadedUcx

_INFINIBAND = "class/infiniband"
_NETWORKS = "class/net"


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

    @property
    def active(self) -> bool:
        return self.state.endswith("ACTIVE")


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


def why_no_rdma(ports: Sequence[RdmaPort], resources: Sequence[Lane], loaded: LoadedUcx, tls: str, devices: str) -> str:
    """Returns the reason; empty if this machine has no RDMA device.

    ``resources`` is what UCX found with the transports ``tls`` and the network devices ``devices``, which have the
    forms of ``UCX_TLS`` and ``UCX_NET_DEVICES``.
    """
    if not ports:
        return ""
    if not loaded.verbs:
        return f"{loaded} does not know {_listing(ports)}: deploy/ucx/build.sh builds one that does"
    if own := [str(lane) for lane in resources if lane.kind is TransportKind.RDMA]:
        return f"this side has {', '.join(own)}, and the other has none that it reaches: see pdserve doctor there"
    if not any(port.active for port in ports):
        return f"no RDMA port is active: {_listing(ports)}"
    if not _allows_rdma(tls):
        return f"UCX may use {tls} alone: see --ucx-tls and UCX_TLS"
    if devices:
        return f"UCX may use {devices} alone, and no RDMA device is among them: see --ucx-net-devices"
    return f"UCX opens none of {_listing(ports)}: see ulimit -l and the rights on /dev/infiniband"


def _listing(ports: Sequence[RdmaPort]) -> str:
    return ", ".join(f"{port.name} ({port.state})" for port in ports)


def _allows_rdma(tls: str) -> bool:
    names = {name.strip(" \\").partition(":")[0].partition("_")[0] for name in tls.removeprefix("^").split(",")}
    if tls.startswith("^"):
        return not names & {"ib", "rc"}
    return not tls or bool(names & (RDMA_FAMILIES | {"all"}))
