"""Says why blocks go over TCP on a machine with RDMA devices, as far as this side can know."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.wire.links import TransportKind
from pdserve_kvtransfer.ucx.rdma_ports import RdmaPort
from pdserve_kvtransfer.ucx.ucx_library import RDMA_FAMILIES, Lane, LoadedUcx


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
