"""``benchmarks failover`` breaks or drains decode nodes under running streams, and compares what clients get.

The answers of one node without speculation are recorded first. Then a real cluster runs on this machine: a proxy,
prefill nodes and decode nodes. Round by round, the same requests stream there, and one decode node is killed (SIGKILL),
stopped (SIGSTOP) or drained (SIGTERM) when every stream runs and a random number of tokens of one has come, at most
three quarters of its answer. Each answer has to be the recorded one, token for token.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from benchmarks.programs import for_servers
from benchmarks.settings import BenchFailoverConfig
from pdserve.bench.cluster import OWN_SETTINGS, known_nodes, read_metrics, running_node, total
from pdserve.bench.load import Job, Target, first_model, run_job, run_jobs, uniform_jobs
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, measured, this_machine
from pdserve.bench.streamed_answer import Stream, distribution
from pdserve.errors import BenchError, ConfigError
from pdserve.process import ServerProcess, partition_cores, pdserve_command
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

_SAMPLING = {"temperature": 0.8, "top_k": 20}
"""Each token is drawn of few: where logits differ with the batch by rounding, that seldom decides such a draw."""
_PLAIN = ("--speculation", "off")
_GRACE_S = 10.0
_DRAIN_S = "60"
"""Nodes that drain get so many seconds: the time that they take is what is measured."""
_POLL_S = 0.005
_ASKING_S = 0.1


class Fault(enum.Enum):
    """What happens to a decode node under its streams."""

    KILL = "kill"
    """SIGKILL: its connections end at once."""
    HANG = "hang"
    """SIGSTOP: its connections stay, and it says nothing any more."""
    DRAIN = "drain"
    """SIGTERM: its streams move while it goes on with them, and it ends when they have."""


@dataclass(slots=True)
class FaultOutcome:
    """What happened to the streams of all rounds with one kind of fault."""

    faults: int = 0
    streams: int = 0
    resumed: int = 0
    wrong: int = 0
    lost: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Each stream that went on elsewhere has here its longest gap between chunks while that may have happened."""
    itls_s: list[float] = field(default_factory=list)
    """The other gaps between chunks."""
    blocks_wanted: float = 0.0
    """The full blocks of the resumed streams, when their nodes were lost."""
    blocks_reused: float = 0.0
    """Those of them that no node had to compute again."""
    accepted_drafts: float = 0.0
    """Those of the streams that nodes have told: what a killed node had not told yet is missing."""
    exits_s: list[float] = field(default_factory=list)
    """The times from SIGTERM to a drained node's exit."""
    answers_s: list[float] = field(default_factory=list)
    """The times from SIGTERM to the end of the last answer."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """The time in which streams left a node."""

    began: float
    ended: float
    """The same as ``began`` unless the node was drained: then it is when the node had ended."""
    accepted_drafts: float
    """Those that the node had told of by then, since it started."""


def run(config: BenchFailoverConfig, environ: Mapping[str, str]) -> Report:
    """Runs all rounds and returns the report.

    Raises ConfigError for an unknown fault, BenchError if the cluster does not start or a round takes too long.
    """
    try:
        faults = [Fault(name) for name in config.failover.faults]
    except ValueError as exc:
        raise ConfigError(f"--faults: {exc}; there are {', '.join(fault.value for fault in Fault)}") from exc
    if config.failover.plain > config.failover.decode:
        raise ConfigError(f"--plain ({config.failover.plain}) is above --decode ({config.failover.decode})")
    outcomes = asyncio.run(_measure(config, faults, environ))
    return Report(
        "failover",
        this_machine(chip_name()),
        to_environ(config),
        (f"{config.failover.decode} decode nodes, {config.failover.clients} streams in each round",),
        tuple(_row(fault, outcome) for fault, outcome in outcomes.items()),
    )


def _row(fault: Fault, outcome: FaultOutcome) -> Row:
    gap, itl = distribution(outcome.gaps_s), distribution(outcome.itls_s)
    drained = [Figure("exit p50", distribution(outcome.exits_s).p50 * 1e3, Unit.MS, Better.LOWER)]
    drained += [Figure("last answer p50", distribution(outcome.answers_s).p50 * 1e3, Unit.MS)]
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
            Figure("accepted drafts", outcome.accepted_drafts, Unit.COUNT, Better.HIGHER),
            Figure("reused blocks", outcome.blocks_reused / (outcome.blocks_wanted or float("nan")), Unit.RATIO),
            Figure("gap p50 : ITL p50", gap.p50 / itl.p50, Unit.RATIO, Better.LOWER),
            *(drained if fault is Fault.DRAIN else ()),
        ),
    )


async def _measure(
    config: BenchFailoverConfig, faults: Sequence[Fault], environ: Mapping[str, str]
) -> dict[Fault, FaultOutcome]:
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
    outcomes = {fault: FaultOutcome() for fault in faults}
    unbroken = await _plain_answers(config, environ, jobs)
    async with _running_cluster(config, environ) as cluster, aiohttp.ClientSession() as session:
        target = Target(cluster.url, await first_model(cluster.url), token_ids=True)
        rounds = _Rounds(cluster, session, target, jobs, unbroken, source, settings.limit_s)
        for number in range(settings.rounds):
            fault = faults[number % len(faults)]
            await rounds.run(number, fault, outcomes[fault])
            outcome = outcomes[fault]
            print(
                f"round {number + 1} of {settings.rounds}, seed {settings.seed}, {fault.value}: "
                f"{outcome.resumed} resumed, {outcome.wrong} wrong, {outcome.lost} lost so far",
                file=sys.stderr,
                flush=True,
            )
    return outcomes


async def _plain_answers(
    config: BenchFailoverConfig, environ: Mapping[str, str], jobs: Sequence[Job]
) -> Sequence[Stream]:
    """Returns what one mixed node without speculation answers to ``jobs``."""
    own, limit_s = {**environ, **for_servers(to_environ(config))}, config.failover.limit_s
    async with running_node("plain", _PLAIN, own, config.failover.startup_timeout_s) as url:
        target = Target(url, await first_model(url), token_ids=True)
        try:
            async with asyncio.timeout(limit_s):
                streams = await run_jobs(target, jobs, len(jobs))
        except TimeoutError as exc:
            raise BenchError(f"before any fault, the answers took more than {limit_s:g} s") from exc
    for stream in streams:
        if stream.error:
            raise BenchError(f"a request failed before any fault: {stream.error}")
    return streams


@dataclass(frozen=True)
class _Rounds:
    """What all rounds share."""

    cluster: _Cluster
    session: aiohttp.ClientSession
    target: Target
    jobs: Sequence[Job]
    unbroken: Sequence[Stream]
    """What the jobs' answers are at one node, where nothing fails."""
    source: random.Random
    limit_s: float

    async def run(self, number: int, fault: Fault, outcome: FaultOutcome) -> None:
        """Streams all jobs, breaks a decode node meanwhile, and adds what clients got to ``outcome``.

        Raises BenchError if that takes too long.
        """
        streams = [Stream(0.0) for _ in self.jobs]
        victim = self.source.choice(self.cluster.decode_names)
        resumed = await self.cluster.resumed(self.session)
        before = await self.cluster.reuse(self.session, victim)
        drafts = -await self.cluster.accepted_drafts(self.session, self.cluster.decode_names)
        # No round finds the KV cache of an earlier one.
        jobs = [replace(job, sampling={**job.sampling, "cache_salt": f"round {number}"}) for job in self.jobs]
        try:
            async with asyncio.timeout(self.limit_s):
                broken = await self._stream(jobs, streams, victim, fault)
        except TimeoutError as exc:
            raise BenchError(f"a round took more than {self.limit_s:g} s") from exc
        newly = int(await self.cluster.resumed(self.session) - resumed)
        # Engines report what they have counted when they fall idle.
        await asyncio.sleep(_ASKING_S)
        after = await self.cluster.reuse(self.session, victim)
        others = [name for name in self.cluster.decode_names if name != victim]
        outcome.accepted_drafts += drafts + broken.accepted_drafts
        outcome.accepted_drafts += await self.cluster.accepted_drafts(self.session, others)
        outcome.blocks_wanted += after.wanted - before.wanted
        outcome.blocks_reused += after.reused - before.reused
        gaps = sorted((gap for stream in streams if (gap := _gap_s(stream, broken)) is not None), reverse=True)
        outcome.faults += 1
        outcome.streams += len(streams)
        outcome.resumed += newly
        outcome.gaps_s += gaps[:newly]
        if fault is Fault.DRAIN:
            outcome.exits_s.append(broken.ended - broken.began)
            outcome.answers_s.append(max(stream.arrivals[-1] for stream in streams) - broken.began)
        for index, (stream, expected) in enumerate(zip(streams, self.unbroken, strict=True)):
            outcome.itls_s += [gap for gap in stream.itls_s if gap not in gaps]
            _judge(index, stream, expected, broken.began, outcome)
        await self.cluster.replace(victim, self.session)

    async def _stream(self, jobs: Sequence[Job], streams: Sequence[Stream], victim: str, fault: Fault) -> _Broken:
        """Streams ``jobs`` into ``streams`` and breaks ``victim`` meanwhile. Returns when that was."""
        watched, after = self.source.choice(streams), self.source.randint(1, jobs[0].output_tokens * 3 // 4)
        pairs = zip(jobs, streams, strict=True)
        running = asyncio.gather(*(run_job(self.session, self.target, *pair) for pair in pairs))
        while not running.done():
            if len(watched.arrivals) >= after and all(stream.arrivals for stream in streams):
                break
            await asyncio.sleep(_POLL_S)
        drafts = await self.cluster.accepted_drafts(self.session, [victim])
        began = ended = time.perf_counter()
        self.cluster.break_node(victim, fault)
        if fault is Fault.DRAIN:
            await self.cluster.drained(victim)
            ended = time.perf_counter()
        await running
        return _Broken(began, ended, drafts)


def _judge(index: int, stream: Stream, expected: Stream, broken_at: float, outcome: FaultOutcome) -> None:
    """Counts an answer that is lost or wrong, and says so."""
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


def _gap_s(stream: Stream, broken: _Broken) -> float | None:
    """Returns the longest gap between chunks of which a part lies in ``broken``; None if there is none."""
    pairs = itertools.pairwise(stream.arrivals)
    gaps = [after - before for before, after in pairs if after > broken.began and before <= broken.ended]
    return max(gaps, default=None)


@dataclass(frozen=True, slots=True)
class _Reuse:
    """The blocks of resumed answers that nodes have counted since they started."""

    wanted: float
    reused: float


class _Cluster:
    """The processes of the cluster, of which decode nodes may be broken and replaced."""

    def __init__(self, config: BenchFailoverConfig, environ: Mapping[str, str]) -> None:
        self._timeout_s = config.failover.startup_timeout_s
        own = {"PDSERVE_SECRET": secrets.token_hex(32), "PDSERVE_DRAIN_S": _DRAIN_S}
        self._environ = {**environ, **for_servers(to_environ(config)), **OWN_SETTINGS, **own}
        roles = [(Role.PREFILL, config.failover.prefill), (Role.DECODE, config.failover.decode)]
        named = [(role, f"{role.value}-{index}") for role, count in roles for index in range(count)]
        cores = partition_cores(sorted(os.sched_getaffinity(0)), len(named))
        self._planned = {name: (role, own_cores) for (role, name), own_cores in zip(named, cores, strict=True)}
        self.decode_names = [name for role, name in named if role is Role.DECODE]
        self._plain = frozenset(self.decode_names[: config.failover.plain])
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
        """Kills, stops or drains the node's API process and its engine."""
        node = self._nodes[name]
        if fault is Fault.KILL:
            node.kill()
            return
        if fault is Fault.DRAIN:
            node.terminate()
            return
        for pid in (*_children(node.pid), node.pid):
            os.kill(pid, signal.SIGSTOP)

    async def drained(self, name: str) -> None:
        """Waits until a node that drains has ended. Raises ChildDied if it does not end in good order."""
        node = self._nodes[name]
        if await node.wait():
            raise node.died()

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
        """Returns how many streams have gone on elsewhere."""
        metrics = await read_metrics(session, self.url)
        resumed = total(metrics, "pdserve_proxy_resumes_total", outcome="resumed")
        return resumed + total(metrics, "pdserve_proxy_moves_total", outcome="moved")

    async def reuse(self, session: aiohttp.ClientSession, victim: str) -> _Reuse:
        """Returns what all decode nodes but ``victim`` have counted."""
        wanted = reused = 0.0
        for node in await known_nodes(session, self.url):
            if node.name in self.decode_names and node.name != victim:
                metrics = await read_metrics(session, node.url)
                wanted += total(metrics, "pdserve_resume_blocks_wanted_total")
                reused += total(metrics, "pdserve_resume_blocks_reused_total")
        return _Reuse(wanted, reused)

    async def accepted_drafts(self, session: aiohttp.ClientSession, names: Collection[str]) -> float:
        """Returns how many drafts these nodes have accepted since they started, as far as they have told."""
        nodes = [node for node in await known_nodes(session, self.url) if node.name in names]
        metrics = [await read_metrics(session, node.url) for node in nodes]
        return sum(total(each, "pdserve_spec_decode_num_accepted_tokens_total") for each in metrics)

    def _start_node(self, name: str) -> None:
        role, cores = self._planned[name]
        listed = ",".join(map(str, cores))
        drafts = _PLAIN if name in self._plain else ()
        flags = ("--name", name, "--proxy", self._control, "--cores", listed, *drafts)
        self._nodes[name] = self._server(name, pdserve_command(role.value, *flags))

    def _server(self, name: str, command: Sequence[str]) -> ServerProcess:
        child = ServerProcess(name, command, self._environ, _relay)
        self._stack.push_async_callback(child.stop, _GRACE_S)
        return child

    async def _until_known(self, session: aiohttp.ClientSession) -> None:
        """Waits until the proxy knows the running nodes and no others. Raises ChildDied if one of them ends."""
        while {node.name for node in await known_nodes(session, self.url)} != self._nodes.keys():
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
