"""Checks the UCX that pdserve has loaded: its transports and devices, and the RDMA ports that the kernel shows.

A context like an engine's says what it uses, and its programs ``ucx_info`` and ``ucx_perftest`` what it could do.
"""

from __future__ import annotations

import enum
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import TransferConfig
from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning
from pdserve.errors import BenchError, TransferError
from pdserve.machine.memory import MIB
from pdserve.process import ChildProcess, exit_words, free_port
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


LOOPBACK = "127.0.0.1"
_START_S = 10.0
_LOOK_S = 0.02
_LISTENING = "0A"
_COLUMNS = 8
_OVERALL_US = 3
_OVERALL_MIB = 5

_TIMEOUT_S = 30.0


class PerftestKind(enum.Enum):
    BANDWIDTH = "tag_bw"
    LATENCY = "tag_lat"
    """Half of a round trip."""


@dataclass(frozen=True, slots=True)
class PerftestResult:
    """The averages of a whole run."""

    microseconds: float
    """One message: time from send to send, or from end to end for ``LATENCY``."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Perftest:
    """The program ``ucx_perftest`` of one UCX."""

    binary: Path
    libraries: Path

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` with the folder in which the program finds its libraries."""
        return {**base, "LD_LIBRARY_PATH": str(self.libraries)}

    def server(self, port: int, environ: Mapping[str, str], core: int | None = None) -> ChildProcess:
        """Starts the side that waits, on all addresses, for one ``client``. The caller ends it."""
        argv = [str(self.binary), "-p", str(port), *_pinned(core)]
        null = subprocess.DEVNULL
        name = "the server side of ucx_perftest"
        return ChildProcess(name, argv, environ=self.environ(environ), stdout=null, stderr=null)

    def client(
        self,
        host: str,
        port: int,
        environ: Mapping[str, str],
        *,
        kind: PerftestKind,
        size: int,
        count: int,
        timeout_s: float,
        core: int | None = None,
        survivable: bool = False,
        memory: str = "host",
    ) -> PerftestResult:
        """Sends ``count`` messages of ``size`` bytes to a waiting ``server``. Raises BenchError.

        ``survivable``: over endpoints that outlive their peer, as pdserve's do. UCX has fewer transports for those.
        ``memory``: ``host`` or ``cuda``, on both sides.
        """
        argv = [str(self.binary), "-p", str(port), *_pinned(core), "-t", kind.value]
        argv += ["-s", str(size), "-n", str(count), "-m", memory, "-f", "-v"]
        argv += [*(["-e"] if survivable else []), host]
        try:
            done = subprocess.run(
                argv,
                env=self.environ(environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise BenchError(f"ucx_perftest did not end within {timeout_s:g} s") from exc
        if done.returncode != 0:
            raise BenchError(f"ucx_perftest {exit_words(done.returncode)}: {_tail(done.stderr)}")
        return parse_result(done.stdout.decode(errors="replace"))

    def pair(
        self,
        environ: Mapping[str, str],
        *,
        kind: PerftestKind,
        size: int,
        count: int,
        timeout_s: float,
        cores: tuple[int, int] | None = None,
        survivable: bool = False,
        memory: str = "host",
    ) -> PerftestResult:
        """Runs both sides on this machine, each on its core of ``cores`` (server, client). Raises BenchError."""
        server_core, client_core = cores or (None, None)
        port = free_port(LOOPBACK)
        deadline = time.monotonic() + timeout_s
        server = self.server(port, environ, server_core)
        try:
            _await_listening(server, port)
            left = max(deadline - time.monotonic(), _LOOK_S)
            return self.client(
                LOOPBACK,
                port,
                environ,
                kind=kind,
                size=size,
                count=count,
                timeout_s=left,
                core=client_core,
                survivable=survivable,
                memory=memory,
            )
        finally:
            server.reap(0.0)


def find_perftest(prefix: Path, libraries: Path) -> Perftest | None:
    """Returns the program of the UCX that was installed into ``prefix``; None if that came without it."""
    found = Perftest(prefix / "bin" / "ucx_perftest", libraries)
    return found if found.binary.is_file() else None


def parse_result(output: str) -> PerftestResult:
    """Reads the CSV line of ``-f -v``: count, µs (median, average, overall), MiB/s, messages/s (average, overall)."""
    for line in reversed(output.splitlines()):
        columns = line.split(",")
        try:
            numbers = [float(column) for column in columns]
        except ValueError:
            continue
        if len(numbers) >= _COLUMNS:
            return PerftestResult(numbers[_OVERALL_US], numbers[_OVERALL_MIB] * MIB)
    raise BenchError(f"ucx_perftest's output is not understood: {output.strip()[-200:]!r}")


def _pinned(core: int | None) -> list[str]:
    return [] if core is None else ["-c", str(core)]


def _await_listening(server: ChildProcess, port: int) -> None:
    # It says nothing that is not buffered, and takes the first connection, be it a probe, for its client.
    deadline = time.monotonic() + _START_S
    while not _is_listening(port):
        if server.ended():
            raise BenchError(server.describe_end())
        if time.monotonic() > deadline:
            raise BenchError(f"ucx_perftest did not listen within {_START_S:g} s")
        time.sleep(_LOOK_S)


def _is_listening(port: int) -> bool:
    end = f":{port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(row[1].endswith(end) and row[3] == _LISTENING for row in rows)


def _tail(stderr: bytes) -> str:
    return stderr.decode(errors="replace").strip()[-300:]


@dataclass(frozen=True, slots=True)
class UcxTools:
    """The paths of UCX's programs, and the libraries that they need."""

    info: Path
    perftest: Path
    library: Path

    def environ(self, environ: Mapping[str, str], tls: str) -> dict[str, str]:
        """Returns the environment that runs them with the transports ``tls``, or as ``environ`` says if it is empty."""
        chosen = {"UCX_TLS": tls} if tls else {}
        return {**environ, "LD_LIBRARY_PATH": str(self.library), "UCX_LOG_LEVEL": "error", **chosen}

    def ask(self, environ: Mapping[str, str], tls: str, *flags: str) -> str:
        """Returns what ``ucx_info`` prints; empty if it fails."""
        try:
            done = subprocess.run(
                [self.info, *flags],
                env=self.environ(environ, tls),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout if done.returncode == 0 else ""


def read_tools(loaded: LoadedUcx | None) -> UcxTools | None:
    """Returns the tools of the loaded UCX, or None if it came without them."""
    if loaded is None:
        return None
    programs = loaded.prefix / "bin"
    tools = UcxTools(programs / "ucx_info", programs / "ucx_perftest", loaded.folder)
    return tools if tools.info.is_file() and tools.perftest.is_file() else None


def check_tools(tools: UcxTools | None) -> Finding:
    if tools is None:
        return warning(
            "UCX tools",
            "the UCX that is loaded came without ucx_info and ucx_perftest",
            "libucx and deploy/ucx/build.sh bring them; without them there is no device list and no yardstick",
        )
    return ok("UCX tools", f"ucx_info and ucx_perftest in {tools.info.parent}")


_LATENCY_BYTES = 8
_LATENCY_ROUNDS = 400
_LOAD_BYTES = 64 * MIB
_MAX_MESSAGES = 2_000
_PERFTEST_TIMEOUT_S = 20.0
_REPEATS = 3
_RUNS_S = 1.0


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What UCX achieves on this machine without pdserve."""

    tls: str
    message_bytes: int
    bytes_per_s: float
    latency_s: float
    """The one-way latency of a message of 8 bytes."""


def read_yardstick(tools: UcxTools, environ: Mapping[str, str], tls: str, message_bytes: int) -> Yardstick | None:
    """Returns None if ``ucx_perftest`` fails, for example with transports that it does not know."""
    messages = max(20, min(_MAX_MESSAGES, _LOAD_BYTES // message_bytes))
    own = tools.environ(environ, tls)
    perftest = Perftest(tools.perftest, tools.library)
    try:
        loads = _runs(perftest, own, PerftestKind.BANDWIDTH, message_bytes, messages)
        small = _runs(perftest, own, PerftestKind.LATENCY, _LATENCY_BYTES, _LATENCY_ROUNDS)
    except BenchError:
        return None
    rate = max(result.bytes_per_s for result in loads)
    return Yardstick(tls, message_bytes, rate, min(result.microseconds for result in small) / 1e6)


def _runs(
    perftest: Perftest, environ: Mapping[str, str], kind: PerftestKind, size: int, count: int
) -> list[PerftestResult]:
    """Returns as many runs as there is time for, at least one. Raises BenchError."""
    deadline = time.monotonic() + _RUNS_S
    found: list[PerftestResult] = []
    while len(found) < _REPEATS and (not found or time.monotonic() < deadline):
        found.append(perftest.pair(environ, kind=kind, size=size, count=count, timeout_s=_PERFTEST_TIMEOUT_S))
    return found
