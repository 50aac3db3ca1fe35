"""Checks the RDMA ports that the kernel shows."""

from __future__ import annotations

from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning
from pdserve_kvtransfer.ucx.rdma_ports import RdmaPort

_ROCE_V2 = "RoCE v2"
_ETHERNET = "Ethernet"
_ROCE_HEADERS = 76
"""The least number of bytes of an Ethernet frame's payload that RoCE needs beside the RDMA MTU."""
_MTUS = (256, 512, 1024, 2048, 4096)


def check_rdma(ports: list[RdmaPort]) -> list[Finding]:
    if not ports:
        return [not_applicable("RDMA ports", "this machine has no RDMA device")]
    return [finding for port in ports for finding in _check_port(port)]


def _check_port(port: RdmaPort) -> list[Finding]:
    check = f"RDMA {port.name}"
    seen = ", ".join(part for part in (port.link_layer, port.state, port.phys_state, port.rate) if part)
    if not port.active:
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
