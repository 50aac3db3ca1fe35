"""``benchmarks gguf-servers`` measures a node beside another server, usually llama-server, that reads the same file.

The files have random weights (``random_gguf``). Both servers are up and take turns at the same requests on the same
cores; nothing is drafted, because random models repeat themselves as no other model does.
"""

from __future__ import annotations

import asyncio
import shlex
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.process_usage import cpu_s, engine_of
from benchmarks.random_gguf import SHAPES, write_gguf
from benchmarks.settings import BenchGgufServersConfig, GgufServersBenchConfig
from pdserve.bench.cluster import OWN_SETTINGS, Program, running
from pdserve.bench.load import Target, first_model, run_jobs, uniform_jobs
from pdserve.bench.report import Better, Figure, Report, Row, Unit, measured, this_machine
from pdserve.bench.streamed_answer import summarise
from pdserve.errors import BenchError, ConfigError
from pdserve.process import ServerProcess, free_port, pdserve_command
from pdserve.settings import to_environ

PDSERVE, PEER = "pdserve", "peer"
_NOTES = (
    "closed loop; figures are medians of rounds, and ratios medians of the rounds' ratios",
    "CPU of a token: of the node's two processes and the peer's one, prompts included, over the tokens of the answers",
)
_VOCABULARY = 49_000
_ASKING_S = 0.2
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that takes requests, and its processes."""

    target: Target
    pids: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one server made of the requests of a round."""

    tokens_per_s: float
    ttft_ms: float
    cpu_ms: float
    """The processor time that a token took."""


def run(config: BenchGgufServersConfig, environ: Mapping[str, str]) -> Report:
    """Measures each shape. Raises ConfigError for an unknown one or a wrong command, and BenchError."""
    if unknown := sorted(set(config.servers.shapes) - SHAPES.keys()):
        raise ConfigError(f"--shapes {unknown[0]} is not known; {', '.join(SHAPES)} are")
    rows = asyncio.run(_measure(config.servers, environ))
    return Report("gguf-servers", this_machine(), to_environ(config), _NOTES, tuple(rows))


async def _measure(config: GgufServersBenchConfig, environ: Mapping[str, str]) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        for shape in config.shapes:
            path = Path(folder) / f"{shape}.gguf"
            write_gguf(SHAPES[shape], path)
            async with _node(config, path, environ) as ours, _peer(config, path, environ) as theirs:
                servers = {PDSERVE: ours, PEER: theirs}
                for server in servers.values():
                    await _turn(config, server, 1, f"{shape}:warm-up")
                for clients in config.clients:
                    rows.append(await _row(config, shape, servers, clients))
            path.unlink()
    return rows


async def _row(config: GgufServersBenchConfig, shape: str, servers: Mapping[str, Server], clients: int) -> Row:
    turns: dict[str, list[Turn]] = {name: [] for name in servers}
    for number in range(config.rounds):
        for name in sorted(servers, reverse=number % 2 == 0):
            # Each round has other prompts, or it would find those of an earlier one in a prefix cache.
            turns[name].append(await _turn(config, servers[name], clients, f"{shape}:{clients}:{number}"))
    ours, theirs = turns[PDSERVE], turns[PEER]
    pairs = list(zip(ours, theirs, strict=True))
    figures = [
        Figure("times better", _middle(a.tokens_per_s / b.tokens_per_s for a, b in pairs), Unit.RATIO, Better.HIGHER),
        Figure("CPU of a token", _middle(_cpu_ratio(a, b) for a, b in pairs), Unit.RATIO, Better.LOWER),
    ]
    for name, made in turns.items():
        figures += [
            Figure(f"{name}, output", _middle(turn.tokens_per_s for turn in made), Unit.TOKENS_PER_S),
            Figure(f"{name}, TTFT p50", _middle(turn.ttft_ms for turn in made), Unit.MS),
            Figure(f"{name}, CPU of a token", _middle(turn.cpu_ms for turn in made), Unit.MS),
        ]
    lengths = f"{config.prompt_tokens}/{config.output_tokens}"
    print(f"{shape}, {clients} clients: {figures[0].value:.2f} times better", file=sys.stderr, flush=True)
    return Row(shape, {"clients": clients, "lengths": lengths}, measured(*figures))


def _cpu_ratio(ours: Turn, theirs: Turn) -> float:
    """Returns the ratio; NaN where the peer's time is below what the kernel counts, as in a turn of few tokens."""
    return ours.cpu_ms / theirs.cpu_ms if theirs.cpu_ms else float("nan")


_middle = statistics.median


async def _turn(config: GgufServersBenchConfig, server: Server, clients: int, seed: str) -> Turn:
    count = clients * config.requests
    jobs = uniform_jobs(count, config.prompt_tokens, config.output_tokens, _VOCABULARY, seed)
    before = sum(cpu_s(server.pids).values())
    try:
        async with asyncio.timeout(config.run_timeout_s):
            streams = await run_jobs(server.target, jobs, clients)
    except TimeoutError as exc:
        raise BenchError(f"{count} requests took more than {config.run_timeout_s:g} s") from exc
    used = sum(cpu_s(server.pids).values()) - before
    result = summarise(streams)
    if result.failed:
        raise BenchError(f"{result.failed} requests of {server.target.model} failed: {result.errors[0]}")
    return Turn(result.output_tokens_per_s, result.ttft_s.p50 * 1e3, used * 1e3 / result.output_tokens)


@asynccontextmanager
async def _node(config: GgufServersBenchConfig, path: Path, environ: Mapping[str, str]) -> AsyncIterator[Server]:
    own = {**environ, **OWN_SETTINGS}
    flags = ("--model", str(path), "--speculation", "off")
    async with running([Program(PDSERVE, pdserve_command("mixed", *flags), own)], config.startup_timeout_s) as (node,):
        url = node.listening.url
        yield Server(Target(url, await first_model(url)), {PDSERVE: node.pid, "its engine": engine_of(node)})


@asynccontextmanager
async def _peer(config: GgufServersBenchConfig, path: Path, environ: Mapping[str, str]) -> AsyncIterator[Server]:
    port = free_port()
    try:
        argv: Sequence[str] = [word.format(model=path, port=port) for word in shlex.split(config.peer_command)]
        child = ServerProcess(PEER, argv, environ, lambda name, line: None)
    except (ValueError, LookupError, OSError) as exc:
        raise ConfigError(f"--peer-command: {exc}") from exc
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(child, url, config.startup_timeout_s)
        yield Server(Target(url, await first_model(url)), {PEER: child.pid})
    finally:
        await child.stop(_GRACE_S)


async def _until_ready(child: ServerProcess, url: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while not await _ready(session, url):
                if not child.alive:
                    raise child.died()
                await asyncio.sleep(_ASKING_S)
    except TimeoutError as exc:
        raise BenchError(f"the peer does not answer after {timeout_s:g} s: {child.last_line}") from exc


async def _ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
