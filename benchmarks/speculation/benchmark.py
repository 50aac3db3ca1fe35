"""``benchmarks speculation`` asks two clusters for the same answers: one speculates, the other does not.

Each cluster is a proxy and a mixed node, and both nodes have all cores. They are asked in turns, so that what else the
machine does meanwhile hits both alike. A single client sends each request to both, one after the other; several clients
send all requests of a kind to the one, and then to the other. Sampling names its seed, so every answer has to be the
same from both: another one ends the study as a failure.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.process_usage import cpu_s, engine_of
from benchmarks.programs import for_servers
from benchmarks.settings import BenchSpeculationConfig
from pdserve.bench.cluster import read_metrics, running_cluster, total
from pdserve.bench.load import Job, Target, first_model, run_job, run_jobs
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, measured, this_machine
from pdserve.bench.streamed_answer import Stream, distribution, summarise
from pdserve.config import Speculate
from pdserve.errors import BenchError
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

KINDS = ("repeating", "free")
"""The sets of prompts: each is a file beside this one, which is a dataset of ``pdserve bench load`` as well."""
TEMPERATURES = (0.0, 0.8)
RATIOS = "with speculation against without"
REQUESTS = "requests of one client"
TPOT, OUTPUT, CPU = "TPOT", "output", "engine CPU"
BY_STEP = "accepted a step"
_SEED = 40


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, and what it is called."""

    name: str
    job: Job


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that are sent together."""

    kind: str
    temperature: float
    clients: int

    @property
    def at(self) -> dict[str, int | str]:
        return {"prompts": self.kind, "temperature": f"{self.temperature:g}", "clients": self.clients}


@dataclass(slots=True)
class Pair:
    """The same requests, answered with speculation and without, in all rounds."""

    case: Case
    prompts: Sequence[Prompt]
    on: list[list[Stream]] = field(default_factory=list)
    """The streams of each round, in the order of the prompts."""
    off: list[list[Stream]] = field(default_factory=list)
    drafts: list[Drafts] = field(default_factory=list)
    """Those of each round; with one client, those of each request."""
    cpu_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    """The CPU time of the engine with speculation, and of the one without, whatever else the machine does."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The number of drafts that were checked, and of those that were accepted."""

    drafted: float
    accepted: float

    def since(self, before: Drafts) -> Drafts:
        return Drafts(self.drafted - before.drafted, self.accepted - before.accepted)

    @classmethod
    def sum(cls, of: Sequence[Drafts]) -> Drafts:
        return cls(sum(each.drafted for each in of), sum(each.accepted for each in of))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster, as its client sees it."""

    target: Target
    node_url: str
    engine: int
    """The process id of the node's engine."""

    def cpu_s(self) -> float:
        return cpu_s({"the engine": self.engine})["the engine"]

    async def drafts(self, session: aiohttp.ClientSession) -> Drafts:
        metrics = await read_metrics(session, self.node_url)
        names = (f"pdserve_spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted"))
        return Drafts(*(total(metrics, name) for name in names))


def run(config: BenchSpeculationConfig, environ: Mapping[str, str]) -> Report:
    """Measures and returns the report.

    Raises BenchError if a cluster does not start, a request fails or an answer is not the same from both.
    """
    pairs = asyncio.run(_measure(config, environ))
    answers = sum(len(round) for pair in pairs for round in pair.on)
    notes = (
        f"{answers} answers are the same with speculation and without",
        "TPOT is the median of the requests' ratios with one client, and the ratio of the medians with more",
    )
    requests = [row for pair in pairs if pair.case.clients == 1 for row in request_rows(pair)]
    rows = (*(compared(pair) for pair in pairs), *requests)
    return Report("speculation", this_machine(chip_name()), to_environ(config), notes, rows)


def read_prompts(kind: str, most: int, most_tokens: int) -> list[Prompt]:
    """Returns the first ``most`` prompts of a kind, with answers of ``most_tokens`` at most."""
    lines = Path(__file__).with_name(f"{kind}.jsonl").read_text().splitlines()
    return [_prompt(json.loads(line), most_tokens) for line in lines[:most]]


def _prompt(line: Mapping[str, Any], most_tokens: int) -> Prompt:
    tokens = min(most_tokens, line["max_tokens"])
    return Prompt(line["name"], Job((), tokens, exact=False, messages=line["messages"]))


def compared(pair: Pair) -> Row:
    """Returns what speculation makes of the requests of one case."""
    ours, theirs = summarise(*pair.on), summarise(*pair.off)
    drafts = Drafts.sum(pair.drafts)
    ratios = [ratio for one, other in _streams(pair) if (ratio := _tpot_ratio(one, other)) is not None]
    # Requests that run beside each other share their steps: then a ratio of its own says nothing of a request.
    alone, together = distribution(ratios).p50, ours.tpot_s.p50 / (theirs.tpot_s.p50 or float("nan"))
    tpot = alone if pair.case.clients == 1 else together
    output = _output_per_s(pair.case, pair.on) / _output_per_s(pair.case, pair.off)
    return Row(RATIOS, pair.case.at, measured(
        Figure(TPOT, tpot, Unit.RATIO, Better.LOWER),
        Figure(OUTPUT, output, Unit.RATIO, Better.HIGHER),
        Figure(CPU, pair.cpu_s[True] / (pair.cpu_s[False] or float("nan")), Unit.RATIO, Better.LOWER),
        Figure("drafted", drafts.drafted, Unit.COUNT, Better.LOWER),
        Figure("accepted", drafts.accepted, Unit.COUNT, Better.HIGHER),
        Figure(BY_STEP, _by_step(drafts, ours.output_tokens), Unit.RATIO, Better.HIGHER),
        Figure("TPOT p50", ours.tpot_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("TPOT p50 without", theirs.tpot_s.p50 * 1e3, Unit.MS, Better.LOWER),
    ))  # fmt: skip


def request_rows(pair: Pair) -> list[Row]:
    """Returns a row for each prompt of a single client: its TPOT, and how many of its drafts were accepted."""
    rows, count = [], len(pair.prompts)
    for place, prompt in enumerate(pair.prompts):
        ours, theirs = ([round[place] for round in rounds] for rounds in (pair.on, pair.off))
        drafts = Drafts.sum(pair.drafts[place::count])
        ratios = [ratio for one, other in zip(ours, theirs, strict=True) if (ratio := _tpot_ratio(one, other))]
        tokens = sum(stream.output_tokens for stream in ours)
        figures = measured(
            Figure(TPOT, distribution(ratios).p50, Unit.RATIO, Better.LOWER),
            Figure("drafted", drafts.drafted, Unit.COUNT, Better.LOWER),
            Figure("accepted", drafts.accepted, Unit.COUNT, Better.HIGHER),
            Figure(BY_STEP, _by_step(drafts, tokens), Unit.RATIO, Better.HIGHER),
        )
        rows.append(Row(REQUESTS, {**pair.case.at, "prompt": prompt.name}, figures))
    return rows


def _output_per_s(case: Case, runs: Sequence[Sequence[Stream]]) -> float:
    """Returns the tokens a second. A single client asks the other cluster as well between two of its requests."""
    if case.clients > 1:
        return summarise(*runs).output_tokens_per_s
    streams = [stream for run in runs for stream in run]
    return sum(stream.output_tokens for stream in streams) / sum(stream.e2e_s for stream in streams)


def _by_step(drafts: Drafts, tokens: int) -> float:
    """Returns the accepted drafts of a request's step, which gives one token besides them."""
    steps = tokens - drafts.accepted
    return drafts.accepted / steps if steps > 0 else float("nan")


def _tpot_ratio(ours: Stream, theirs: Stream) -> float | None:
    own, other = ours.tpot_s, theirs.tpot_s
    return own / other if own is not None and other else None


def _streams(pair: Pair) -> list[tuple[Stream, Stream]]:
    return [both for on, off in zip(pair.on, pair.off, strict=True) for both in zip(on, off, strict=True)]


async def _measure(config: BenchSpeculationConfig, environ: Mapping[str, str]) -> list[Pair]:
    settings = config.speculation
    prompts = {kind: read_prompts(kind, settings.prompts, settings.output_tokens) for kind in KINDS}
    pairs = [
        Pair(Case(kind, temperature, clients), [_sampled(prompt, temperature) for prompt in prompts[kind]])
        for clients in settings.clients
        for kind in KINDS
        for temperature in TEMPERATURES
    ]
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        modes = {True: config.scheduler.speculation, False: Speculate.OFF}
        clusters = {
            on: await stack.enter_async_context(_running_cluster(config, environ, mode)) for on, mode in modes.items()
        }
        for cluster in clusters.values():
            for prompt in prompts[KINDS[0]][:2]:
                await _ask(config, session, cluster, prompt)
        for number in range(settings.rounds):
            for pair in pairs:
                print(f"round {number + 1}, {_shown(pair.case)}", file=sys.stderr, flush=True)
                first = number % 2 == 0
                if pair.case.clients == 1:
                    await _one_by_one(config, session, clusters, pair, first)
                else:
                    await _together(config, session, clusters, pair, first)
                check_equal(pair)
    return pairs


def _sampled(prompt: Prompt, temperature: float) -> Prompt:
    return replace(prompt, job=replace(prompt.job, sampling={"temperature": temperature, "seed": _SEED}))


def _shown(case: Case) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.at.items())


async def _one_by_one(
    config: BenchSpeculationConfig,
    session: aiohttp.ClientSession,
    clusters: Mapping[bool, Cluster],
    pair: Pair,
    first: bool,
) -> None:
    """Sends each request to both clusters, to the one with speculation ``first``, or last, by turns."""
    streams: dict[bool, list[Stream]] = {True: [], False: []}
    for number, prompt in enumerate(pair.prompts):
        before = await clusters[True].drafts(session)
        for on in sorted(clusters, reverse=first == (number % 2 == 0)):
            cpu_before_s = clusters[on].cpu_s()
            streams[on].append(await _ask(config, session, clusters[on], prompt))
            pair.cpu_s[on] += clusters[on].cpu_s() - cpu_before_s
        pair.drafts.append((await clusters[True].drafts(session)).since(before))
    pair.on.append(streams[True])
    pair.off.append(streams[False])


async def _together(
    config: BenchSpeculationConfig,
    session: aiohttp.ClientSession,
    clusters: Mapping[bool, Cluster],
    pair: Pair,
    first: bool,
) -> None:
    """Sends all requests to one cluster, and then to the other one."""
    before = await clusters[True].drafts(session)
    jobs = [prompt.job for prompt in pair.prompts]
    for on in sorted(clusters, reverse=first):
        limit_s, cpu_before_s = config.speculation.limit_s, clusters[on].cpu_s()
        try:
            async with asyncio.timeout(limit_s * len(jobs)):
                streams = await run_jobs(clusters[on].target, jobs, pair.case.clients)
        except TimeoutError as exc:
            raise BenchError(f"{len(jobs)} answers took more than {limit_s * len(jobs):g} s") from exc
        pair.cpu_s[on] += clusters[on].cpu_s() - cpu_before_s
        (pair.on if on else pair.off).append([_checked(stream) for stream in streams])
    pair.drafts.append((await clusters[True].drafts(session)).since(before))


async def _ask(
    config: BenchSpeculationConfig, session: aiohttp.ClientSession, cluster: Cluster, prompt: Prompt
) -> Stream:
    try:
        async with asyncio.timeout(config.speculation.limit_s):
            return _checked(await run_job(session, cluster.target, prompt.job, Stream(0.0)))
    except TimeoutError as exc:
        raise BenchError(f"an answer took more than {config.speculation.limit_s:g} s") from exc


def _checked(stream: Stream) -> Stream:
    if stream.error:
        raise BenchError(f"a request failed: {stream.error}")
    return stream


def check_equal(pair: Pair) -> None:
    """Raises BenchError if an answer of the last round is another one with speculation."""
    for prompt, ours, theirs in zip(pair.prompts, pair.on[-1], pair.off[-1], strict=True):
        if (ours.text, ours.output_tokens) != (theirs.text, theirs.output_tokens):
            raise BenchError(
                f"{prompt.name!r} ({_shown(pair.case)}) has {ours.text!r} with speculation and {theirs.text!r} without"
            )


@asynccontextmanager
async def _running_cluster(
    config: BenchSpeculationConfig, environ: Mapping[str, str], mode: Speculate
) -> AsyncIterator[Cluster]:
    own = {**environ, **for_servers(to_environ(config)), "PDSERVE_SPECULATION": mode.value}
    cores = sorted(os.sched_getaffinity(0))
    label, timeout_s = f"speculation {mode.value}", config.speculation.startup_timeout_s
    async with running_cluster(label, [Role.MIXED], cores, own, timeout_s) as cluster:
        (node,) = cluster.nodes.values()
        target = Target(cluster.url, await first_model(cluster.url))
        yield Cluster(target, node.listening.url, engine_of(node))
