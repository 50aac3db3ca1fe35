"""Checks the transports and devices that UCX reports, and the RDMA ports that the kernel shows.

UCX is asked by a context like an engine's, and by ``ucx_info -d``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.config import TransferConfig
from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning
from pdserve.errors import TransferError
from pdserve.wire.discovery import TransportKind
from pdserve_kvtransfer.configuration import configured_ucx
from pdserve_kvtransfer.ucx.rdma_ports import RdmaPort
from pdserve_kvtransfer.ucx.ucx_library import PREFER_SYSTEM, SHARED_MEMORY, Lane, LoadedUcx

MEMORY_TRANSPORTS = SHARED_MEMORY | {"self", "cma", "knem", "cuda_copy", "cuda_ipc", "gdr_copy"}
_CUDA_PREFIXES = ("cuda", "gdr")
_ALIASES = frozenset({"all", "self", "sm", "shm", "mm", "ib", "rc", "ud", "dc", "rc_x", "ud_x", "cuda", "ugni", "tcp"})
_ROCE_V2 = "RoCE v2"
_ETHERNET = "Ethernet"
_ROCE_HEADERS = 76
"""The least number of bytes of an Ethernet frame's payload that RoCE needs beside the RDMA MTU."""
_MTUS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class UcxFacts:
    tls: str
    """The transports that are set, in the form of ``UCX_TLS``; empty if UCX chooses them."""
    usable: tuple[Lane, ...]
    """Transports and devices that an engine's context has with ``tls``."""
    error: str
    """Why there is no such context; empty if there is one."""
    all_transports: frozenset[str]
    """Every transport that this UCX finds, whether ``tls`` selects it or not."""
    loaded: LoadedUcx | None
    rdma_devices: tuple[str, ...]
    """The RDMA devices that the kernel shows."""
    gpus: int


def read_ucx(config: TransferConfig) -> tuple[tuple[Lane, ...], str]:
    """Returns what an engine's UCX context may use, and the error if there is no context."""
    try:
        transport = configured_ucx(config)
    except TransferError as exc:
        return (), str(exc)
    try:
        return transport.resources(), ""
    finally:
        transport.close()


def parse_transports(text: str) -> frozenset[str]:
    """Returns the transports that the output of ``ucx_info -d`` lists."""
    return frozenset(re.findall(r"^#\s+Transport: (\S+)$", text, re.MULTILINE))


def check_ucx(facts: UcxFacts) -> list[Finding]:
    if facts.error:
        advice = "clear --ucx-tls and UCX_TLS: empty lets UCX choose" if facts.tls else "reinstall libucx"
        return [problem("UCX transports", facts.error, advice)]
    return [
        ok("UCX transports", _listing(facts.usable)),
        _chosen(facts),
        _shared_memory(facts),
        _network(facts.usable),
        _rdma(facts),
        _cuda(facts),
    ]


def _listing(devices: Sequence[Lane]) -> str:
    by_transport: dict[str, list[str]] = {}
    for device in devices:
        by_transport.setdefault(device.transport, []).append(device.device)
    return ", ".join(
        transport if set(names) == {"memory"} else f"{transport} ({', '.join(dict.fromkeys(names))})"
        for transport, names in by_transport.items()
        if transport != "self"
    )


def _chosen(facts: UcxFacts) -> Finding:
    check = "UCX_TLS"
    if not facts.tls:
        return ok(check, "empty: UCX chooses")
    names = [name.strip("^\\ ").partition(":")[0] for name in facts.tls.split(",")]
    unknown = [name for name in names if name not in facts.all_transports | _ALIASES]
    if unknown and facts.all_transports:
        here = ", ".join(sorted(facts.all_transports))
        return warning(
            check, f"{facts.tls}: UCX has no {', '.join(unknown)} here", f"leave it empty, or take of these: {here}"
        )
    return ok(check, facts.tls)


def _shared_memory(facts: UcxFacts) -> Finding:
    found = [device.transport for device in facts.usable if device.transport in SHARED_MEMORY]
    if found:
        return ok("shared memory", f"{' and '.join(dict.fromkeys(found))}, also for connections that can fail")
    return warning(
        "shared memory",
        "none: two nodes of this machine would move KV blocks over the network stack",
        f"add sm to --ucx-tls, which is {facts.tls}"
        if facts.tls
        else "see /dev/shm, and whether System V IPC is allowed",
    )


def _network(devices: Sequence[Lane]) -> Finding:
    networks = [device for device in devices if device.transport not in MEMORY_TRANSPORTS]
    beyond = [f"{device.transport} on {device.device}" for device in networks if device.device not in ("lo", "memory")]
    if beyond:
        return ok("networks for KV", ", ".join(dict.fromkeys(beyond)) + "; whoever reaches UCX there can end a node")
    return warning(
        "networks for KV",
        "none beyond loopback: nodes of other machines cannot move KV blocks to this one",
        "add tcp to --ucx-tls, or see which interfaces are up and UCX_NET_DEVICES",
    )


def _rdma(facts: UcxFacts) -> Finding:
    check = "RDMA in UCX"
    found = [device for device in facts.usable if device.kind is TransportKind.RDMA]
    if found:
        return ok(check, ", ".join(map(str, found)))
    if not facts.rdma_devices:
        return not_applicable(check, "this machine has no RDMA device")
    kernel = f"the kernel has {', '.join(facts.rdma_devices)}"
    if facts.loaded is not None and not facts.loaded.verbs:
        return problem(
            check,
            f"{kernel}, but this is {facts.loaded}",
            f"build one with deploy/ucx/build.sh, name its lib folder in LD_LIBRARY_PATH, and set {PREFER_SYSTEM}=true",
        )
    return problem(
        check,
        f"{kernel}, but UCX uses none of them",
        "see --ucx-tls and UCX_NET_DEVICES, the ulimit for locked memory, and the rights on /dev/infiniband",
    )


def _cuda(facts: UcxFacts) -> Finding:
    check = "CUDA in UCX"
    found = [device.transport for device in facts.usable if device.transport.startswith(_CUDA_PREFIXES)]
    if found:
        return ok(check, ", ".join(dict.fromkeys(found)))
    if not facts.gpus:
        return not_applicable(check, "torch finds no GPU")
    return warning(
        check,
        "there is a GPU, but UCX has no CUDA transport: KV blocks go through host memory",
        "add cuda to --ucx-tls, and see that the driver's libcuda.so.1 is found",
    )


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
