"""``benchmarks turns`` leads conversations with two clusters: one returns the KV blocks of answers, one does not.

Each cluster is a proxy, a prefill node and decode nodes on this machine, and every prompt is computed remotely. A
conversation's prompt is all that was said before, and some new tokens. The clusters take turns, each with conversations
of its own, so that what else the machine does meanwhile hits both alike.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from benchmarks.process_usage import cpu_s, engine_of
from benchmarks.programs import for_servers
from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.settings import BenchTurnsConfig, TurnsBenchConfig
from pdserve.bench.cluster import read_metrics, running_cluster, total
from pdserve.bench.load import Job, Target, first_model, run_job
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, measured, this_machine
from pdserve.bench.streamed_answer import Stream, distribution
from pdserve.config import KvReturn
from pdserve.errors import BenchError
from pdserve.hub.finding import find_model
from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.gguf.file import is_gguf
from pdserve.settings import to_environ
from pdserve.wire.discovery import Role

MODES = (KvReturn.ON, KvReturn.OFF)
RATIOS = "with KV return against without"
_FIRST_ID = 3


HYBRID: dict[str, object] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 8192,
}
"""A Qwen 3 Next of some 80 million weights, with 12 layers."""


def write_hybrid(model: Path, layers: int, folder: Path) -> None:
    """Writes a random hybrid model that has the tokenizer, and so the vocabulary, of ``model``. Raises ModelError."""
    shape = HYBRID | {"num_hidden_layers": layers, "vocab_size": read_decoder_config(model).vocab_size}
    write_checkpoint("qwen3_next", shape, folder)
    if is_gguf(model):
        gguf_tokenizer(model).save_pretrained(folder)
        return
    for path in (*model.glob("*token*.json"), *model.glob("chat_template*")):
        shutil.copy(path, folder)


@dataclass(slots=True)
class Turn:
    """What was measured of one turn of all conversations with one cluster."""

    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    """The tokens of the prompt that the prefill node has computed."""
    cpu_s: list[float] = field(default_factory=list)
    """The CPU time of the decode nodes' engines for a token of the answer, whatever else the machine does."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster, as its client sees it."""

    target: Target
    prefill_url: str
    decode_engines: Mapping[str, int]
    """The process ids of the decode nodes' engines, by the nodes' names."""

    def decode_cpu_s(self) -> float:
        return sum(cpu_s(self.decode_engines).values())


def run(config: BenchTurnsConfig, environ: Mapping[str, str]) -> Report:
    """Leads all conversations and returns the report. Raises BenchError if a cluster does not start or answer."""
    turns = asyncio.run(_measure(config, environ))
    settings = config.turns
    note = (
        f"{settings.conversations} conversations with each cluster: a first prompt of {settings.first_tokens} tokens, "
        f"{settings.new_tokens} new ones in each later turn, answers of {settings.output_tokens} tokens"
    )
    if settings.hybrid_layers:
        note += f"; a random hybrid model of {settings.hybrid_layers} layers"
    return Report("turns", this_machine(chip_name()), to_environ(config), (note,), (*_rows(turns), *_ratios(turns)))


def _rows(turns: Mapping[KvReturn, Sequence[Turn]]) -> list[Row]:
    rows = []
    for mode, measures in turns.items():
        for number, turn in enumerate(measures, 1):
            ttft, tpot = distribution(turn.ttfts_s), distribution(turn.tpots_s)
            figures = measured(
                Figure("computed", distribution(turn.computed).p50, Unit.COUNT, Better.LOWER),
                Figure("TTFT p50", ttft.p50 * 1e3, Unit.MS, Better.LOWER),
                Figure("TTFT p90", ttft.p90 * 1e3, Unit.MS, Better.LOWER),
                Figure("TPOT p50", tpot.p50 * 1e3, Unit.MS, Better.LOWER),
                Figure("decode CPU", distribution(turn.cpu_s).p50 * 1e3, Unit.MS, Better.LOWER),
            )
            rows.append(Row("turns", {"KV return": mode.value, "turn": number}, figures))
    return rows


def _ratios(turns: Mapping[KvReturn, Sequence[Turn]]) -> list[Row]:
    rows = []
    for number, (ours, theirs) in enumerate(zip(turns[KvReturn.ON], turns[KvReturn.OFF], strict=True), 1):
        figures = measured(
            _ratio("TTFT p50", ours.ttfts_s, theirs.ttfts_s),
            _ratio("TPOT p50", ours.tpots_s, theirs.tpots_s),
            _ratio("decode CPU", ours.cpu_s, theirs.cpu_s),
        )
        rows.append(Row(RATIOS, {"turn": number}, figures))
    return rows


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    return Figure(name, distribution(ours).p50 / distribution(theirs).p50, Unit.RATIO, Better.LOWER)


async def _measure(config: BenchTurnsConfig, environ: Mapping[str, str]) -> dict[KvReturn, list[Turn]]:
    settings = config.turns
    source = random.Random(settings.seed)  # noqa: S311  # the prompts must be repeatable, not secret
    turns = {mode: [Turn() for _ in range(settings.turns)] for mode in MODES}
    async with AsyncExitStack() as stack:
        if settings.hybrid_layers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-")))
            write_hybrid(find_model(config.model, environ).path, settings.hybrid_layers, folder)
            config = replace(config, model=replace(config.model, path=str(folder)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        clusters = {mode: await stack.enter_async_context(_running_cluster(config, environ, mode)) for mode in MODES}
        for cluster in clusters.values():
            await _converse(settings, session, cluster, source, [Turn(), Turn()])
        for number in range(settings.conversations):
            for mode in sorted(MODES, key=lambda mode: mode.value, reverse=number % 2 == 0):
                print(f"conversation {number + 1}, KV return {mode.value}", file=sys.stderr, flush=True)
                await _converse(settings, session, clusters[mode], source, turns[mode])
    return turns


async def _converse(
    settings: TurnsBenchConfig,
    session: aiohttp.ClientSession,
    cluster: Cluster,
    source: random.Random,
    turns: Sequence[Turn],
) -> None:
    """Leads one conversation, and adds what it measures to ``turns``."""
    said: list[int] = []
    for number, turn in enumerate(turns):
        new = settings.new_tokens if number else settings.first_tokens
        said += [source.randrange(_FIRST_ID, settings.vocab_size) for _ in range(new)]
        before, cpu_before_s = await _computed(session, cluster), cluster.decode_cpu_s()
        try:
            async with asyncio.timeout(settings.limit_s):
                stream = await run_job(session, cluster.target, Job(said, settings.output_tokens), Stream(0.0))
        except TimeoutError as exc:
            raise BenchError(f"an answer took more than {settings.limit_s:g} s") from exc
        if stream.error:
            raise BenchError(f"a request failed: {stream.error}")
        said += stream.token_ids
        # The client reads the answer before it says more.
        await asyncio.sleep(settings.pause_s)
        turn.computed.append(await _computed(session, cluster) - before)
        turn.cpu_s.append((cluster.decode_cpu_s() - cpu_before_s) / len(stream.token_ids))
        turn.ttfts_s.append(stream.ttft_s)
        if stream.tpot_s is not None:
            turn.tpots_s.append(stream.tpot_s)


async def _computed(session: aiohttp.ClientSession, cluster: Cluster) -> float:
    """Returns how many tokens of prompts the prefill node has computed."""
    metrics = await read_metrics(session, cluster.prefill_url)
    return total(metrics, "pdserve_prefix_cache_queries_total") - total(metrics, "pdserve_prefix_cache_hits_total")


@asynccontextmanager
async def _running_cluster(
    config: BenchTurnsConfig, environ: Mapping[str, str], mode: KvReturn
) -> AsyncIterator[Cluster]:
    settings = config.turns
    own = {
        **environ,
        **for_servers(to_environ(config)),
        "PDSERVE_KV_RETURN": mode.value,
        "PDSERVE_DISAGGREGATION": "always",
    }
    roles = [Role.PREFILL] + [Role.DECODE] * settings.decode
    cores = sorted(os.sched_getaffinity(0))
    async with running_cluster(f"KV return {mode.value}", roles, cores, own, settings.startup_timeout_s) as cluster:
        prefill, *decode = cluster.nodes
        target = Target(cluster.url, await first_model(cluster.url), token_ids=True)
        engines = {node: engine_of(cluster.nodes[node]) for node in decode}
        yield Cluster(target, cluster.nodes[prefill].listening.url, engines)
