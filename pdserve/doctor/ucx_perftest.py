"""UCX's own benchmark, ``ucx_perftest``: what UCX can do here without pdserve."""

from __future__ import annotations

import enum
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import BenchError
from pdserve.process import ChildProcess, exit_words, free_port

LOOPBACK = "127.0.0.1"
_MIB = 2**20
_START_S = 10.0
_LOOK_S = 0.02
_LISTENING = "0A"
_COLUMNS = 8
_OVERALL_US = 3
_OVERALL_MIB = 5


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
            return PerftestResult(numbers[_OVERALL_US], numbers[_OVERALL_MIB] * _MIB)
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
