"""Starts what ``benchmarks proxy`` compares: two mock backends, asked directly, through pdserve's proxy, and through
another program if there is one.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.proxy.mock_backend import SECRET_ENV, backend_command
from pdserve.bench.cluster import Program, Running, running
from pdserve.errors import BenchError, ConfigError
from pdserve.process import ServerProcess, free_port, pdserve_command
from pdserve.wire.discovery import Role

MODEL = "bench"
LOOPBACK = "127.0.0.1"
DIRECT, PDSERVE, PEER = "backend", "pdserve", "peer"
_PORTS = ("port", "port2")
_ASKING_S = 0.1
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class System:
    """A server that takes requests."""

    name: str
    host: str
    port: int
    pids: dict[str, int]
    """The id, by ``name``, of the process whose CPU time and memory count."""


def request(system: System, body: bytes) -> bytes:
    """Returns a text completion's request as it goes over the wire."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: %s:%d\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return (head % (system.host, system.port, len(body))).encode() + body


@asynccontextmanager
async def running_systems(
    peer_command: str, environ: Mapping[str, str], timeout_s: float
) -> AsyncIterator[list[System]]:
    """Yields the backend, pdserve, and with ``peer_command`` the peer, once all of them take requests.

    Raises BenchError if one takes none in ``timeout_s``, ChildDied if one ends, ConfigError for an invalid command.
    """
    plain = {name: value for name, value in environ.items() if not name.startswith("PDSERVE_")}
    secret, port, control = secrets.token_hex(32), free_port(), free_port()
    own = {
        **plain,
        SECRET_ENV: secret,
        "PDSERVE_HOST": LOOPBACK,
        "PDSERVE_PORT": str(port),
        "PDSERVE_CONTROL_PORT": str(control),
        # A log line for each request would add its reader's work to the measurement.
        "PDSERVE_LOG_LEVEL": "warning",
    }
    programs = [
        Program(
            f"{role.value} backend",
            backend_command(role, MODEL, f"tcp://{LOOPBACK}:{control}"),
            {**plain, SECRET_ENV: secret},
        )
        for role in (Role.PREFILL, Role.DECODE)
    ]
    async with (
        _stopped_after(_child(PDSERVE, pdserve_command("proxy"), own)) as proxy,
        running(programs, timeout_s) as (prefill, decode),
    ):
        systems = [_backend(decode), System(PDSERVE, LOOPBACK, port, {PDSERVE: proxy.pid})]
        await _until_it_answers(proxy, systems[1], timeout_s)
        if not peer_command:
            yield systems
            return
        async with _peer(peer_command, prefill, decode, plain, timeout_s) as peer:
            yield [*systems, peer]


@asynccontextmanager
async def _peer(
    template: str, prefill: Running, decode: Running, environ: Mapping[str, str], timeout_s: float
) -> AsyncIterator[System]:
    ports = {name: free_port() for name in _PORTS}
    urls = {"prefill": prefill.listening.url, "decode": decode.listening.url}
    try:
        argv = [word.format(**urls, **ports) for word in shlex.split(template)]
        child = _child(PEER, argv, environ)
    except (ValueError, LookupError, OSError) as exc:
        raise ConfigError(f"--peer-command: {exc}") from exc
    async with _stopped_after(child):
        system = System(PEER, LOOPBACK, ports["port"], {PEER: child.pid})
        await _until_it_answers(child, system, timeout_s)
        yield system


def _child(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> ServerProcess:
    return ServerProcess(name, argv, environ, lambda name, line: None)


@asynccontextmanager
async def _stopped_after(child: ServerProcess) -> AsyncIterator[ServerProcess]:
    try:
        yield child
    finally:
        await child.stop(_GRACE_S)


async def _until_it_answers(child: ServerProcess, system: System, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not await _answers(system):
                if not child.alive:
                    raise child.died()
                await asyncio.sleep(_ASKING_S)
    except TimeoutError as exc:
        raise BenchError(f"{system.name} does not answer after {timeout_s:g} s: {child.last_line}") from exc


async def _answers(system: System) -> bool:
    try:
        reader, writer = await asyncio.open_connection(system.host, system.port)
    except OSError:
        return False
    try:
        writer.write(request(system, plain_body()))
        return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False
    finally:
        writer.close()


def plain_body() -> bytes:
    return b'{"model":"%b","prompt":"hello world","max_tokens":64}' % MODEL.encode()


def stream_body(chunks: int, gap_ms: int) -> bytes:
    """Returns a request for ``chunks`` chunks of the backend with ``gap_ms`` between them."""
    fields = (MODEL.encode(), chunks, gap_ms)
    return b'{"model":"%b","prompt":"hello world","max_tokens":%d,"stream":true,"user":"gap-%d"}' % fields


def _backend(process: Running) -> System:
    parts = urlsplit(process.listening.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return System(DIRECT, parts.hostname, parts.port, {DIRECT: process.pid})
