"""UCX's own yardstick: ``ucx_perftest`` between two processes of this machine."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.doctor.ucx_tools import UcxTools

_MIB = 2**20
_LATENCY_BYTES = 8
_LATENCY_ROUNDS = 400
_LOAD_BYTES = 64 * _MIB
_MAX_MESSAGES = 2_000
_TIMEOUT_S = 20.0
_REPEATS = 3
_RUNS_S = 1.0
_START_S = 5.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What UCX does here without pdserve."""

    tls: str
    message_bytes: int
    bytes_per_s: float
    latency_s: float
    """One way, of 8 bytes."""


def read_yardstick(tools: UcxTools, environ: Mapping[str, str], tls: str, message_bytes: int) -> Yardstick | None:
    """The best of some runs; None if ``ucx_perftest`` fails, as with transports that it does not know."""
    messages = max(20, min(_MAX_MESSAGES, _LOAD_BYTES // message_bytes))
    own = tools.environ(environ, tls)
    loads = _runs(tools, own, "tag_bw", message_bytes, messages)
    small = _runs(tools, own, "tag_lat", _LATENCY_BYTES, _LATENCY_ROUNDS) if loads else []
    if not small:
        return None
    rate = max(line.mib_per_s for line in loads) * _MIB
    return Yardstick(tls, message_bytes, rate, min(line.average_us for line in small) / 1e6)


@dataclass(frozen=True, slots=True)
class Line:
    """The last line of ``ucx_perftest``, which begins with ``Final:``."""

    average_us: float
    mib_per_s: float


def parse_final(text: str) -> Line | None:
    """None if there is no such line."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Final:"] and len(words) >= 7:
            return Line(float(words[3]), float(words[6]))
    return None


def _runs(tools: UcxTools, environ: Mapping[str, str], test: str, size: int, rounds: int) -> list[Line]:
    """As many as there is time for; empty if the first fails."""
    deadline = time.monotonic() + _RUNS_S
    found: list[Line] = []
    while len(found) < _REPEATS and (not found or time.monotonic() < deadline):
        line = _run(tools, environ, test, size, rounds)
        if line is None:
            break
        found.append(line)
    return found


def _run(tools: UcxTools, environ: Mapping[str, str], test: str, size: int, rounds: int) -> Line | None:
    port = _free_port()
    serve = [str(tools.perftest), "-p", str(port)]
    ask = [*serve, "-t", test, "-s", str(size), "-n", str(rounds), "-w", str(max(10, rounds // 10)), "127.0.0.1"]
    server = subprocess.Popen(serve, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return _ask(ask, environ, server)
    finally:
        server.kill()
        server.wait()


def _ask(command: list[str], environ: Mapping[str, str], server: subprocess.Popen[bytes]) -> Line | None:
    """Again and again until the server listens: trying whether it does would take its one client's place."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = parse_final(done.stdout)
        if found is not None or server.poll() is not None or time.monotonic() > deadline:
            return found
        time.sleep(_PAUSE_S)


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port
