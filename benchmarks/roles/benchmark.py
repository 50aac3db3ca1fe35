"""``benchmarks roles`` gives the same shifting load to a cluster with ``--roles auto`` and to each static split.

Phases of long prompts, which need prefill nodes, and phases of long answers, which need decode nodes, take turns. Each
run has a cluster of its own: a proxy and three nodes whose steps wait instead of computing (``paced_engine``), so that
they do not fight for the cores of this machine. *Goodput* counts the requests that met both targets.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.programs import for_servers
from benchmarks.random_llama import Shape, write_random_model
from benchmarks.roles.pace import Pace
from benchmarks.roles.paced_node import paced_node_command
from benchmarks.settings import BenchRolesConfig, RolesBenchConfig
from benchmarks.workload import Arrival, run_arrivals
from pdserve.bench.cluster import OWN_SETTINGS, Program, read_metrics, running, total, until_known
from pdserve.bench.load import Target, first_model, uniform_jobs
from pdserve.bench.report import Better, Figure, Report, Row, Unit, measured, this_machine
from pdserve.bench.streamed_answer import AnswerTargets, Stream, distribution
from pdserve.config import RoleChoice
from pdserve.errors import BenchError, ConfigError
from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.model_files import packaged_gguf
from pdserve.process import pdserve_command
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

_SHAPE = Shape(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=1024,
    max_position_embeddings=8192,
)
"""The model only says how large a KV block is, and how large the vocabulary."""
_AUTO = "auto"
_TTFT_SHARE, _ITL_SHARE = 0.4, 0.8
"""The controller aims at these shares of the targets, because a node that moves relieves only those that come later."""


@dataclass(frozen=True, slots=True)
class Split:
    """The roles at the start of a run, and whether they change."""

    name: str
    prefill: int
    decode: int
    roles: RoleChoice


@dataclass(frozen=True, slots=True)
class SplitOutcome:
    """What one run's clients got, and how often a node changed its role."""

    streams: Sequence[Stream]
    switches: int


def run(config: BenchRolesConfig, environ: Mapping[str, str]) -> Report:
    """Runs all splits, one after the other, and returns the report.

    Raises ConfigError for an unknown split, BenchError if a cluster does not start or a run takes too long.
    """
    settings = config.splits
    splits = [_split(name) for name in settings.splits]
    planned = arrivals(settings)
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        model = _write_model(Path(folder))
        outcomes = {split.name: asyncio.run(_measure(config, split, model, planned, environ)) for split in splits}
    return Report(
        "roles",
        this_machine(),
        to_environ(config),
        (
            f"three nodes whose steps wait instead of computing; {len(planned)} requests in {2 * settings.cycles} "
            f"phases of {settings.phase_s:g} s; a good one has its first token in {settings.ttft_ms:g} ms and the "
            f"others every {settings.itl_ms:g} ms in the mean",
        ),
        tuple(_row(name, outcome, outcomes, settings) for name, outcome in outcomes.items()),
    )


def _split(name: str) -> Split:
    if name == _AUTO:
        return Split(name, 1, 2, RoleChoice.AUTO)
    counts = re.fullmatch(r"(\d+)\+(\d+)", name)
    if counts is None:
        raise ConfigError(f"--splits: {name!r} is neither {_AUTO!r} nor two numbers of nodes such as '1+2'")
    return Split(name, int(counts[1]), int(counts[2]), RoleChoice.FIXED)


def _write_model(folder: Path) -> Path:
    write_random_model(_SHAPE, folder)
    gguf_tokenizer(packaged_gguf()).save_pretrained(folder)
    return folder


def _row(name: str, outcome: SplitOutcome, outcomes: Mapping[str, SplitOutcome], settings: RolesBenchConfig) -> Row:
    complete = [stream for stream in outcome.streams if not stream.error]
    ttft = distribution([stream.ttft_s for stream in complete])
    tpot = distribution([tpot_s for stream in complete if (tpot_s := stream.tpot_s) is not None])
    good = _good(outcome, settings)
    static = [_good(other, settings) for split, other in outcomes.items() if split != _AUTO]
    ratio = good / max(static) if name == _AUTO and static and max(static) else float("nan")
    return Row(
        "roles",
        {"split": name},
        measured(
            Figure("requests", len(outcome.streams), Unit.COUNT),
            Figure("good", good, Unit.COUNT, Better.HIGHER),
            Figure("goodput", good / (2 * settings.cycles * settings.phase_s), Unit.REQUESTS_PER_S, Better.HIGHER),
            Figure("failed", sum(bool(stream.error) for stream in outcome.streams), Unit.COUNT, Better.LOWER),
            Figure("switches", outcome.switches, Unit.COUNT),
            Figure("TTFT p50", ttft.p50 * 1e3, Unit.MS, Better.LOWER),
            Figure("TTFT p99", ttft.p99 * 1e3, Unit.MS, Better.LOWER),
            Figure("TPOT p50", tpot.p50 * 1e3, Unit.MS, Better.LOWER),
            Figure("TPOT p99", tpot.p99 * 1e3, Unit.MS, Better.LOWER),
            Figure("goodput : best static split", ratio, Unit.RATIO, Better.HIGHER),
        ),
    )


def _good(outcome: SplitOutcome, settings: RolesBenchConfig) -> int:
    targets = AnswerTargets(settings.ttft_ms / 1000, settings.itl_ms / 1000)
    return sum(map(targets.met_in_mean, outcome.streams))


async def _measure(
    config: BenchRolesConfig, split: Split, model: Path, planned: Sequence[Arrival], environ: Mapping[str, str]
) -> SplitOutcome:
    settings = config.splits
    async with _cluster(config, split, model, environ) as url, aiohttp.ClientSession() as session:
        target = Target(url, await first_model(url), token_ids=True)
        try:
            async with asyncio.timeout(2 * settings.cycles * settings.phase_s + settings.limit_s):
                streams = await run_arrivals(target, planned)
        except TimeoutError as exc:
            raise BenchError(
                f"{split.name}: not all answers were complete {settings.limit_s:g} s after the end"
            ) from exc
        switches = total(await read_metrics(session, url), "pdserve_proxy_role_switches_total", outcome="done")
    outcome = SplitOutcome(streams, int(switches))
    print(
        f"{split.name}: {_good(outcome, settings)} of {len(streams)} requests met both targets, {outcome.switches} "
        "switches",
        file=sys.stderr,
        flush=True,
    )
    return outcome


@asynccontextmanager
async def _cluster(
    config: BenchRolesConfig, split: Split, model: Path, environ: Mapping[str, str]
) -> AsyncIterator[str]:
    """Yields the URL of a proxy that knows all nodes of a split."""
    settings = config.splits
    own = {
        **environ,
        **for_servers(to_environ(config)),
        **OWN_SETTINGS,
        "PDSERVE_SECRET": secrets.token_hex(32),
        "PDSERVE_MODEL": str(model),
        "PDSERVE_SERVED_MODEL_NAME": "paced",
        "PDSERVE_KV_CACHE_MIB": "64",
        "PDSERVE_MAX_NUM_SEQS": str(settings.max_num_seqs),
        "PDSERVE_DISAGGREGATION": "always",
        "PDSERVE_POLICY": "least-loaded",
        "PDSERVE_ROLES": split.roles.value,
        "PDSERVE_TARGET_TTFT_MS": str(_TTFT_SHARE * settings.ttft_ms),
        "PDSERVE_TARGET_ITL_MS": str(_ITL_SHARE * settings.itl_ms),
        "PDSERVE_HEARTBEAT_MS": "250",
        "PDSERVE_ROLES_INTERVAL_MS": "250",
        "PDSERVE_ROLES_LOOKS": "4",
        "PDSERVE_ROLES_REST_S": "5",
    }
    pace = Pace(settings.step_ms / 1e3, settings.row_ms / 1e3, 1 / settings.prompt_tokens_per_s)
    named = [(Role.PREFILL, f"node-{index}") for index in range(split.prefill)]
    named += [(Role.DECODE, f"node-{split.prefill + index}") for index in range(split.decode)]
    timeout_s = settings.startup_timeout_s
    proxy = Program("proxy", pdserve_command("proxy", "--control-port", "0"), own)
    async with running([proxy], timeout_s) as (served,):
        nodes = [
            Program(
                name,
                paced_node_command(role, pace),
                {**own, "PDSERVE_PROXY": served.listening.control, "PDSERVE_NAME": name},
            )
            for role, name in named
        ]
        async with running(nodes, timeout_s), aiohttp.ClientSession() as session:
            await until_known(session, served.listening.url, len(nodes), timeout_s)
            yield served.listening.url


def arrivals(config: RolesBenchConfig) -> list[Arrival]:
    """Returns the requests of all phases, which come independently of each other (a Poisson process)."""
    source = random.Random(f"roles:{config.seed}")  # noqa: S311  # the times must be repeatable, not secret
    shapes = [
        (config.prompt_rate, config.long_prompt, config.short_answer),
        (config.answer_rate, config.short_prompt, config.long_answer),
    ]
    found: list[Arrival] = []
    for phase in range(2 * config.cycles):
        rate, prompt_tokens, output_tokens = shapes[phase % 2]
        at_s, end_s = phase * config.phase_s, (phase + 1) * config.phase_s
        times = []
        while (at_s := at_s + source.expovariate(rate)) < end_s:
            times.append(at_s)
        jobs = uniform_jobs(len(times), prompt_tokens, output_tokens, config.vocab_size, f"roles:{config.seed}:{phase}")
        found += [Arrival(at_s, job) for at_s, job in zip(times, jobs, strict=True)]
    return found
