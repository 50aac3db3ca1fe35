"""``pdserve bench failover`` kills and stops decode nodes under running streams, and compares what clients get.

A real cluster runs on this machine: a proxy, prefill nodes and decode nodes. Its answers are recorded first while
nothing fails. Then, round by round, the same requests stream again, and one decode node is killed (SIGKILL) or stopped
(SIGSTOP) when every stream runs and a random number of tokens of one has come, at most three quarters of its answer.
Each answer has to be the recorded one, token for token.
"""

from __future__ import annotations

import asyncio
import enum
import os
import random
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec

from pdserve.bench.load import Job, Target, first_model, run_job, uniform_jobs
from pdserve.bench.machine import chip_name, this_machine
from pdserve.bench.programs import OWN_SETTINGS
from pdserve.bench.report import Better, Figure, Report, Row, Unit, measured
from pdserve.bench.streamed_answer import Stream, distribution
from pdserve.bench_config import BenchFailoverConfig
from pdserve.errors import BenchError, ConfigError
from pdserve.process import ServerProcess, partition_cores, pdserve_command
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

_SAMPLING = {"temperature": 0.8, "top_k": 20}
"""Each token is drawn of few: where logits differ with the batch by rounding, that seldom decides such a draw."""
_GRACE_S = 10.0
_POLL_S = 0.005
_ASKING_S = 0.1
_RESUMED = re.compile(r'^pdserve_proxy_resumes_total\{outcome="resumed"\} (\S+)$', re.MULTILINE)


class Fault(enum.Enum):
    """What happens to a decode node under its streams."""

    KILL = "kill"
    """SIGKILL: its connections end at once."""
    HANG = "hang"
    """SIGSTOP: its connections stay, and it says nothing any more."""


@dataclass(slots=True)
class Outcome:
    """What happened to the streams of all rounds with one kind of fault."""

    faults: int = 0
    streams: int = 0
    resumed: int = 0
    wrong: int = 0
    lost: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Each resumed stream has here the time from its last chunk before the fault to its first one after it."""
    itls_s: list[float] = field(default_factory=list)
    """The other gaps between chunks."""


def run(config: BenchFailoverConfig, environ: Mapping[str, str]) -> Report:
    """Runs all rounds and returns the report.

    Raises ConfigError for an unknown fault, BenchError if the cluster does not start or a round takes too long.
    """
    try:
        faults = [Fault(name) for name in config.failover.faults]
    except ValueError as exc:
        raise ConfigError(f"--faults: {exc}; there are {', '.join(fault.value for fault in Fault)}") from exc
    outcomes = asyncio.run(_measure(config, faults, environ))
    return Report(
        "failover",
        this_machine(chip_name()),
        to_environ(config),
        (f"{config.failover.decode} decode nodes, {config.failover.clients} streams in each round",),
        tuple(_row(fault, outcome) for fault, outcome in outcomes.items()),
    )


def _row(fault: Fault, outcome: Outcome) -> Row:
    gap, itl = distribution(outcome.gaps_s), distribution(outcome.itls_s)
    return Row(
        "failover",
        {"fault": fault.value},
        measured(
            Figure("faults", outcome.faults, Unit.COUNT),
            Figure("streams", outcome.streams, Unit.COUNT),
            Figure("resumed", outcome.resumed, Unit.COUNT),
            Figure("wrong", outcome.wrong, Unit.COUNT, Better.LOWER),
            Figure("lost", outcome.lost, Unit.COUNT, Better.LOWER),
            Figure("gap p50", gap.p50 * 1e3, Unit.MS, Better.LOWER),
            Figure("gap p99", gap.p99 * 1e3, Unit.MS, Better.LOWER),
            Figure("ITL p50", itl.p50 * 1e3, Unit.MS, Better.LOWER),
            Figure("gap p50 : ITL p50", gap.p50 / itl.p50, Unit.RATIO, Better.LOWER),
        ),
    )


async def _measure(
    config: BenchFailoverConfig, faults: Sequence[Fault], environ: Mapping[str, str]
) -> dict[Fault, Outcome]:
    settings = config.failover
    source = random.Random(settings.seed)  # noqa: S311  # the faults must be repeatable, not secret
    jobs = [
        replace(job, sampling={**_SAMPLING, "seed": index})
        for index, job in enumerate(
            uniform_jobs(
                settings.clients,
                settings.prompt_tokens,
                settings.output_tokens,
                settings.vocab_size,
                f"failover:{settings.seed}",
            )
        )
    ]
    outcomes = {fault: Outcome() for fault in faults}
    async with _running_cluster(config, environ) as cluster, aiohttp.ClientSession() as session:
        target = Target(cluster.url, await first_model(cluster.url), token_ids=True)
        unbroken = await asyncio.gather(*(run_job(session, target, job, Stream(0.0)) for job in jobs))
        for stream in unbroken:
            if stream.error:
                raise BenchError(f"a request failed before any fault: {stream.error}")
        for number in range(settings.rounds):
            fault = faults[number % len(faults)]
            await _round(cluster, session, target, jobs, unbroken, fault, source, outcomes[fault], settings.limit_s)
            told = outcomes[fault]
            print(
                f"round {number + 1} of {settings.rounds}, seed {settings.seed}, {fault.value}: "
                f"{told.resumed} resumed, {told.wrong} wrong, {told.lost} lost so far",
                file=sys.stderr,
                flush=True,
            )
    return outcomes


async def _round(
    cluster: _Cluster,
    session: aiohttp.ClientSession,
    target: Target,
    jobs: Sequence[Job],
    unbroken: Sequence[Stream],
    fault: Fault,
    source: random.Random,
    outcome: Outcome,
    limit_s: float,
) -> None:
    """Streams all jobs, breaks a decode node meanwhile, and adds what clients got to ``outcome``."""
    streams = [Stream(0.0) for _ in jobs]
    victim = source.choice(cluster.decode_names)
    watched, after = source.randrange(len(jobs)), source.randint(1, jobs[0].output_tokens * 3 // 4)
    resumed = await cluster.resumed(session)
    try:
        async with asyncio.timeout(limit_s):
            running = asyncio.gather(*(run_job(session, target, *pair) for pair in zip(jobs, streams, strict=True)))
            while not running.done():
                if len(streams[watched].arrivals) >= after and all(stream.arrivals for stream in streams):
                    break
                await asyncio.sleep(_POLL_S)
            broken_at = time.perf_counter()
            cluster.break_node(victim, fault)
            await running
    except TimeoutError as exc:
        raise BenchError(f"a round took more than {limit_s:g} s") from exc
    newly = int(await cluster.resumed(session) - resumed)
    gaps = sorted((gap for stream in streams if (gap := _gap_s(stream, broken_at)) is not None), reverse=True)
    outcome.faults += 1
    outcome.streams += len(streams)
    outcome.resumed += newly
    outcome.gaps_s += gaps[:newly]
    for index, (stream, expected) in enumerate(zip(streams, unbroken, strict=True)):
        outcome.itls_s += [gap for gap in stream.itls_s if gap not in gaps]
        if stream.error:
            outcome.lost += 1
            print(f"answer {index} was lost: {stream.error}", file=sys.stderr, flush=True)
        elif (stream.token_ids, stream.text) != (expected.token_ids, expected.text):
            outcome.wrong += 1
            pairs = zip(stream.token_ids, expected.token_ids, strict=False)
            same = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), "no")
            print(
                f"answer {index} is wrong: it has {len(stream.token_ids)} tokens and differs from token {same} on; "
                f"{sum(arrival <= broken_at for arrival in stream.arrivals)} chunks came before the fault",
                file=sys.stderr,
                flush=True,
            )
    await cluster.replace(victim, session)


def _gap_s(stream: Stream, broken_at: float) -> float | None:
    """Returns the gap between chunks in which ``broken_at`` lies; None if it lies in none."""
    before = [arrival for arrival in stream.arrivals if arrival <= broken_at]
    after = [arrival for arrival in stream.arrivals if arrival > broken_at]
    return after[0] - before[-1] if before and after else None


class _Known(msgspec.Struct):
    """The part of an entry of ``/instances`` that is read here."""

    name: str


_instances = msgspec.json.Decoder(list[_Known])


class _Cluster:
    """The processes of the cluster, of which decode nodes may be broken and replaced."""

    def __init__(self, config: BenchFailoverConfig, environ: Mapping[str, str]) -> None:
        self._timeout_s = config.failover.startup_timeout_s
        secret = {"PDSERVE_SECRET": secrets.token_hex(32)}
        self._environ = {**environ, **to_environ(config), **OWN_SETTINGS, **secret}
        roles = [(Role.PREFILL, config.failover.prefill), (Role.DECODE, config.failover.decode)]
        named = [(role, f"{role.value}-{index}") for role, count in roles for index in range(count)]
        cores = partition_cores(sorted(os.sched_getaffinity(0)), len(named))
        self._planned = {name: (role, own_cores) for (role, name), own_cores in zip(named, cores, strict=True)}
        self.decode_names = [name for role, name in named if role is Role.DECODE]
        self._nodes: dict[str, ServerProcess] = {}
        self._stack = AsyncExitStack()
        self.url = self._control = ""

    async def start(self) -> None:
        proxy = self._server("proxy", pdserve_command("proxy", "--control-port", "0"))
        async with asyncio.timeout(self._timeout_s):
            found = await proxy.listening()
            self.url, self._control = found.url, found.control
            for name in self._planned:
                self._start_node(name)
            async with aiohttp.ClientSession() as session:
                await self._until_known(session)

    async def stop(self) -> None:
        await self._stack.aclose()

    def break_node(self, name: str, fault: Fault) -> None:
        """Kills or stops the node's API process and its engine."""
        node = self._nodes[name]
        if fault is Fault.KILL:
            node.kill()
            return
        for pid in (*_children(node.pid), node.pid):
            os.kill(pid, signal.SIGSTOP)

    async def replace(self, name: str, session: aiohttp.ClientSession) -> None:
        """Ends what is left of a broken node, starts another one in its place, and waits until the proxy has it.

        Raises ChildDied if a node ends by itself, TimeoutError if it takes too long.
        """
        node = self._nodes.pop(name)
        await node.end(0.0)
        async with asyncio.timeout(self._timeout_s):
            await self._until_known(session)
            self._start_node(name)
            await self._until_known(session)

    async def resumed(self, session: aiohttp.ClientSession) -> float:
        """Returns how many streams the proxy has resumed."""
        async with session.get(self.url + "/metrics") as response:
            found = _RESUMED.search(await response.text())
        return float(found[1]) if found else 0.0

    def _start_node(self, name: str) -> None:
        role, cores = self._planned[name]
        listed = ",".join(map(str, cores))
        flags = ("--name", name, "--proxy", self._control, "--cores", listed)
        self._nodes[name] = self._server(name, pdserve_command(role.value, *flags))

    def _server(self, name: str, command: Sequence[str]) -> ServerProcess:
        child = ServerProcess(name, command, self._environ, _relay)
        self._stack.push_async_callback(child.stop, _GRACE_S)
        return child

    async def _until_known(self, session: aiohttp.ClientSession) -> None:
        """Waits until the proxy knows the running nodes and no others. Raises ChildDied if one of them ends."""
        while True:
            async with session.get(self.url + "/instances") as response:
                known = {node.name for node in _instances.decode(await response.read())}
            if known == self._nodes.keys():
                return
            for node in self._nodes.values():
                if not node.alive:
                    raise node.died()
            await asyncio.sleep(_ASKING_S)


@asynccontextmanager
async def _running_cluster(config: BenchFailoverConfig, environ: Mapping[str, str]) -> AsyncIterator[_Cluster]:
    cluster = _Cluster(config, environ)
    try:
        try:
            await cluster.start()
        except TimeoutError as exc:
            raise BenchError(f"the cluster was not ready after {config.failover.startup_timeout_s:g} s") from exc
        yield cluster
    finally:
        await cluster.stop()


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def _relay(name: str, line: str) -> None:
    if " ERROR " in line:
        print(f"{name} | {line}", file=sys.stderr, flush=True)
