"""Runs the programs of the UCX that pdserve has loaded, ``ucx_info`` and ``ucx_perftest``, and reads their output."""

from __future__ import annotations

import enum
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.doctor.finding import Finding, ok, warning
from pdserve.errors import BenchError
from pdserve.machine.memory import MIB
from pdserve.process import ChildProcess, exit_words, free_port
from pdserve_kvtransfer.ucx.ucx_library import LoadedUcx

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
