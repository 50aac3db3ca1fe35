"""Runs the programs of the UCX that pdserve has loaded: ``ucx_info`` and ``ucx_perftest``.

The yardstick for a probe is the best of several runs of ``ucx_perftest`` between two processes of this machine.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.doctor.finding import Finding, ok, warning
from pdserve.doctor.ucx_perftest import Perftest, PerftestKind, PerftestResult
from pdserve.errors import BenchError
from pdserve_kvtransfer.ucx.ucx_library import LoadedUcx

_TIMEOUT_S = 30.0


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


_MIB = 2**20
_LATENCY_BYTES = 8
_LATENCY_ROUNDS = 400
_LOAD_BYTES = 64 * _MIB
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
