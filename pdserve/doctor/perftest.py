"""UCX's own yardstick for a probe: the best of some runs of ``ucx_perftest`` between two processes of this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.doctor.ucx_tools import UcxTools
from pdserve.errors import BenchError
from pdserve.ucx_perftest import Perftest, PerftestKind, PerftestResult

_MIB = 2**20
_LATENCY_BYTES = 8
_LATENCY_ROUNDS = 400
_LOAD_BYTES = 64 * _MIB
_MAX_MESSAGES = 2_000
_TIMEOUT_S = 20.0
_REPEATS = 3
_RUNS_S = 1.0


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What UCX does here without pdserve."""

    tls: str
    message_bytes: int
    bytes_per_s: float
    latency_s: float
    """One way, of 8 bytes."""


def read_yardstick(tools: UcxTools, environ: Mapping[str, str], tls: str, message_bytes: int) -> Yardstick | None:
    """None if ``ucx_perftest`` fails, as with transports that it does not know."""
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
    """As many as there is time for, at least one. Raises BenchError."""
    deadline = time.monotonic() + _RUNS_S
    found: list[PerftestResult] = []
    while len(found) < _REPEATS and (not found or time.monotonic() < deadline):
        found.append(perftest.pair(environ, kind=kind, size=size, count=count, timeout_s=_TIMEOUT_S))
    return found
