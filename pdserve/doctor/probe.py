"""Measures bandwidth and latency between this process and a prefill engine, beside those of UCX alone.

Where no peer is named, the engine is a ``StandIn`` without a model, in its own process: ``python -m
pdserve.doctor.probe`` reads it as a line of JSON from standard input, writes its control address as one line, and ends
when its standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from pdserve.config import TransferConfig
from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning
from pdserve.doctor.machine import LimitFacts
from pdserve.doctor.ucx import Yardstick
from pdserve.errors import TransferError
from pdserve.process import AnsweringProcess, ChildDied, python_program
from pdserve.wire.ids import new_id
from pdserve.wire.transfer import MAX_PROBE_BYTES, MAX_PROBE_MESSAGE_BYTES, EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kvtransfer.configuration import bound_to_loopback, configured_ucx, side_settings
from pdserve_kvtransfer.probe.examiner import Examiner, Measured
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.thread import TransferThread
from pdserve_kvtransfer.ucx.ucx_library import SHARED_MEMORY, Lane

_MIN_MESSAGES = 16
_MAX_MESSAGES = 8192
_LOW_SHARE = 0.3
"""A probe with a smaller share of UCX's own figure is reported. Machines are busy and probes short: half is normal."""
_LOW_LINE_SHARE = 0.25
_HIGH_LATENCY_S = 5e-3
_SMALL_SHM_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ProbeFacts:
    """One probe, and what is needed to judge it."""

    peer: str
    measured: Measured | None
    error: str
    """Why there is no figure; empty if there is one."""
    yardstick: Yardstick | None
    same_machine: bool
    same_ipc_namespace: bool
    tls: str
    """The transports that this side may use, in the form of ``UCX_TLS``; empty if UCX chooses them."""
    mbit_per_s: int
    """The speed of the interface to the peer; 0 if the interface does not report one."""


def message_size(block_bytes: int) -> int:
    """Returns the size of a KV block, or the largest size that a probe may send."""
    return min(block_bytes, MAX_PROBE_MESSAGE_BYTES)


def message_count(message_bytes: int, mib: int) -> int:
    """Returns how many messages make about ``mib`` MiB."""
    wanted = max(_MIN_MESSAGES, mib * 2**20 // message_bytes)
    return max(1, min(wanted, _MAX_MESSAGES, MAX_PROBE_BYTES // message_bytes))


def read_probe(asker: Examiner, message_bytes: int, mib: int, timeout_s: float) -> tuple[Measured | None, str]:
    """Returns the figures, or None and the reason why there are none."""
    try:
        return asker.probe(message_bytes, message_count(message_bytes, mib), timeout_s), ""
    except TransferError as exc:
        return None, str(exc)


def transports_of(lanes: Iterable[Lane]) -> str:
    """Returns the transports of ``lanes`` in the form of ``UCX_TLS``."""
    return ",".join(dict.fromkeys(lane.transport for lane in lanes))


def check_probe(facts: ProbeFacts, limits: LimitFacts) -> list[Finding]:
    name = facts.peer.removeprefix("tcp://")
    check = f"probe {name}"
    if facts.measured is None:
        if "another probe" in facts.error:
            return [not_applicable(check, f"{facts.error}: run it again in a moment")]
        advice = (
            "see the prefill node's log, --ucx-tls on both sides, and the firewall: UCX takes ports of its own, which "
            "UCX_TCP_PORT_RANGE names"
        )
        return [problem(check, facts.error, advice)]
    measured = facts.measured
    return [
        _way(facts, measured, limits, f"transport {name}"),
        _bandwidth(facts, measured, f"bandwidth {name}"),
        _latency(facts, measured, f"latency {name}"),
    ]


def _way(facts: ProbeFacts, measured: Measured, limits: LimitFacts, check: str) -> Finding:
    seen = "KV blocks travel by " + (
        " and ".join(f"{lane.transport} on {lane.device}" for lane in measured.lanes) or "a way that UCX does not name"
    )
    if not facts.same_machine:
        return ok(check, seen)
    if not measured.lanes or any(lane.transport in SHARED_MEMORY for lane in measured.lanes):
        return ok(check, seen)
    return warning(check, f"{seen}, although both are on one machine", _why_no_memory(facts, limits))


def _why_no_memory(facts: ProbeFacts, limits: LimitFacts) -> str:
    if not facts.same_ipc_namespace:
        return (
            "they are in different IPC namespaces: run both containers with --ipc=host --network=host (hostIPC and "
            "hostNetwork: true), or leave it so; with --ipc=host alone they need --ucx-tls tcp"
        )
    if facts.tls:
        return f"shared memory is not among the transports {facts.tls}: add sm to --ucx-tls and UCX_TLS, or clear them"
    if limits.shm_total <= _SMALL_SHM_BYTES:
        return "shared memory space is small: give it 1 GiB or more (docker run --shm-size=1g)"
    return "see --ucx-tls of the other node, and that both run as the same user"


def _bandwidth(facts: ProbeFacts, measured: Measured, check: str) -> Finding:
    rate = measured.bytes_per_s
    size = f"blocks of {measured.message_bytes // 1024} KiB"
    if not rate:
        return problem(
            check, f"only {measured.received} {size} came in time", "see the network: drops, duplex, MTU on the way"
        )
    seen = f"{_rate(rate)} in {size}{_beside(facts)}"
    if facts.same_machine and facts.yardstick and rate < _LOW_SHARE * facts.yardstick.bytes_per_s:
        return warning(
            check,
            seen,
            "see whether others use these cores (engines here), and give nodes cores of their own with --cores",
        )
    line = facts.mbit_per_s * 1e6 / 8
    if not facts.same_machine and rate < _LOW_LINE_SHARE * line:
        return warning(
            check,
            f"{seen}; the interface does {_rate(line)}",
            "run ucx_perftest -t tag_bw between the two hosts; see MTU, --ucx-net-devices and --ucx-rails",
        )
    return ok(check, seen)


def _beside(facts: ProbeFacts) -> str:
    yard = facts.yardstick
    if yard is None:
        return ""
    where = "" if facts.same_machine else " inside this machine"
    by = f" by {yard.tls}" if yard.tls else ""
    return f"; ucx_perftest{where}{by}: {_rate(yard.bytes_per_s)}"


def _latency(facts: ProbeFacts, measured: Measured, check: str) -> Finding:
    beside = f"; ucx_perftest: {_micros(facts.yardstick.latency_s)}" if facts.yardstick else ""
    seen = f"{_micros(measured.latency_s)} one way, thread to thread{beside}"
    if measured.latency_s > _HIGH_LATENCY_S:
        return warning(check, seen, "keep prefill and decode nodes in one rack or zone; see who uses the network")
    return ok(check, seen)


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds >= 1e-5 else f"{seconds * 1e6:.2f} µs"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


_SPEC = EngineSpec(
    protocol=PROTOCOL_VERSION,
    oldest_protocol=OLDEST_PROTOCOL,
    fingerprint="none",
    dtype="none",
    block_size=1,
    num_layers=1,
    kv_heads=1,
    head_dim=1,
    tp_size=1,
)
_START_S = 60.0
_CLOSE_S = 5.0


class StandIn(msgspec.Struct, frozen=True):
    """The order that a stand-in gets at its start."""

    secret: bytes
    transfer: TransferConfig
    block_bytes: int


@contextmanager
def standing_in(told: StandIn, environ: Mapping[str, str]) -> Iterator[str]:
    """Yields the control address of a stand-in that runs until the block ends. Raises TransferError if it fails."""
    try:
        child = AnsweringProcess(
            "the local probe", python_program("pdserve.doctor.probe"), environ, stderr=subprocess.DEVNULL
        )
    except OSError as exc:
        raise TransferError(f"the local probe cannot be started: {exc}") from exc
    try:
        try:
            address = child.ask(told, _START_S).decode().strip()
        except ChildDied as exc:
            raise TransferError("the local probe did not come up") from exc
        yield address
    finally:
        child.reap(2 * _CLOSE_S)


def main() -> int:
    told = msgspec.json.decode(sys.stdin.buffer.readline(), type=StandIn)
    thread = TransferThread(
        boot_id=new_id(),
        secret=told.secret,
        spec=_SPEC,
        region=KvRegion(memoryview(bytearray(told.block_bytes)), told.block_bytes),
        settings=side_settings(told.transfer),
        transport=partial(configured_ucx, told.transfer, loopback=bound_to_loopback(told.transfer)),
        wake=lambda: None,
    )
    try:
        print(thread.start(), flush=True)
        # This returns when the process that started this one closes the pipe or ends.
        os.read(sys.stdin.fileno(), 1)
    finally:
        thread.close(_CLOSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
