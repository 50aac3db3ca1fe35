"""``benchmarks batching`` compares continuous with static batching: two real nodes serve the same requests.

At each concurrency both nodes take turns at the same jobs, which a closed loop of that many clients sends. Prompts and
answers differ in length, as people's do: with answers of one length a static batch would lose nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain

from benchmarks.programs import for_servers
from benchmarks.settings import BenchBatchingConfig
from benchmarks.workload import mixed_jobs
from pdserve.bench.cluster import running_node
from pdserve.bench.load import Target, first_model, run_jobs
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, measured, this_machine
from pdserve.bench.streamed_answer import LoadResult, Stream, summarise
from pdserve.config import Batching
from pdserve.errors import BenchError
from pdserve.settings import to_environ

MODE = "mode"
MODES = (Batching.STATIC, Batching.CONTINUOUS)
RATIOS = "continuous against static"
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """The runs of the same jobs in both modes."""

    concurrency: int
    runs: Mapping[Batching, Sequence[Sequence[Stream]]]

    @property
    def differing(self) -> int:
        """Returns the number of answers whose tokens are not the same in both modes."""
        return sum(
            ours.token_ids != theirs.token_ids
            for ours, theirs in zip(
                chain(*self.runs[Batching.CONTINUOUS]), chain(*self.runs[Batching.STATIC]), strict=True
            )
        )


def run(config: BenchBatchingConfig, environ: Mapping[str, str]) -> Report:
    """Measures both modes and returns the report. Raises BenchError if a node does not start or a request fails."""
    pairs = asyncio.run(_measure(config, environ))
    answers = sum(len(run) for pair in pairs for run in pair.runs[Batching.STATIC])
    differing = sum(pair.differing for pair in pairs)
    return Report(
        "batching",
        this_machine(chip_name()),
        to_environ(config),
        (
            _description(config),
            f"{differing} of {answers} greedy answers ({config.model.dtype.short}) differ between the modes",
        ),
        (*(row for pair in pairs for row in _rows(pair)), *(compared(pair) for pair in pairs)),
    )


def _description(config: BenchBatchingConfig) -> str:
    work = config.workload
    return (
        "closed loop: each client sends its next request when its last is answered; prompts of "
        f"{work.min_prompt_tokens} to {work.max_prompt_tokens} and answers of "
        f"{work.min_output_tokens} to {work.max_output_tokens} tokens, "
        "log-uniform; a static batch takes all that wait when the one before it is over"
    )


async def _measure(config: BenchBatchingConfig, environ: Mapping[str, str]) -> list[Pair]:
    own = {**environ, **for_servers(to_environ(config))}
    timeout_s = config.batching.startup_timeout_s
    async with AsyncExitStack() as stack:
        targets = {}
        for mode in MODES:
            node = running_node(mode.value, ["--batching", mode.value], own, timeout_s)
            url = await stack.enter_async_context(node)
            targets[mode] = Target(url, await first_model(url), token_ids=True)
        for target in targets.values():
            await _load(config, target, 1, _WARM_UP, "warm-up")
        return [await _pair(config, targets, concurrency) for concurrency in config.batching.concurrency]


async def _pair(config: BenchBatchingConfig, targets: Mapping[Batching, Target], concurrency: int) -> Pair:
    count = config.batching.requests or max(12, 3 * concurrency)
    runs: dict[Batching, list[list[Stream]]] = {mode: [] for mode in targets}
    for turn in range(config.batching.repeats):
        for mode in sorted(targets, key=lambda mode: mode.value, reverse=turn % 2 == 0):
            print(f"{mode.value}, concurrency {concurrency}, {count} requests", file=sys.stderr, flush=True)
            # Each run has other prompts, or it would find those of an earlier run in the prefix cache.
            runs[mode].append(await _load(config, targets[mode], concurrency, count, f"{concurrency}:{turn}"))
    return Pair(concurrency, runs)


async def _load(config: BenchBatchingConfig, target: Target, concurrency: int, count: int, seed: str) -> list[Stream]:
    jobs = mixed_jobs(config.workload, count, f"batching:{config.workload.seed}:{seed}")
    limit_s = config.batching.run_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            streams = await run_jobs(target, jobs, concurrency)
    except TimeoutError as exc:
        raise BenchError(f"{count} requests at concurrency {concurrency} took more than {limit_s:g} s") from exc
    for stream in streams:
        if stream.error:
            raise BenchError(f"a request failed at concurrency {concurrency}: {stream.error}")
    return streams


def _rows(pair: Pair) -> list[Row]:
    return [
        Row("batching", {"concurrency": pair.concurrency, MODE: mode.value}, load_figures(summarise(*runs)))
        for mode, runs in pair.runs.items()
    ]


def load_figures(result: LoadResult) -> tuple[Figure, ...]:
    """Returns the figures of one mode at one concurrency."""
    return measured(
        Figure("TTFT mean", result.ttft_s.mean * 1e3, Unit.MS, Better.LOWER),
        Figure("TTFT p50", result.ttft_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("TTFT p99", result.ttft_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("TPOT mean", result.tpot_s.mean * 1e3, Unit.MS, Better.LOWER),
        Figure("ITL p50", result.itl_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("ITL p99", result.itl_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("output", result.output_tokens_per_s, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure("requests", result.requests_per_s, Unit.REQUESTS_PER_S, Better.HIGHER),
        Figure("failed", result.failed, Unit.COUNT, Better.LOWER),
    )


def compared(pair: Pair) -> Row:
    """Returns a row that says how many times better continuous batching is."""
    ours, theirs = (summarise(*pair.runs[mode]) for mode in (Batching.CONTINUOUS, Batching.STATIC))
    figures = [
        _ratio("TTFT mean", theirs.ttft_s.mean, ours.ttft_s.mean),
        _ratio("TTFT p50", theirs.ttft_s.p50, ours.ttft_s.p50),
        _ratio("TTFT p99", theirs.ttft_s.p99, ours.ttft_s.p99),
        _ratio("TPOT mean", theirs.tpot_s.mean, ours.tpot_s.mean),
        _ratio("output", ours.output_tokens_per_s, theirs.output_tokens_per_s),
        Figure("differing answers", pair.differing, Unit.COUNT, Better.LOWER),
    ]
    return Row(RATIOS, {"concurrency": pair.concurrency}, measured(*figures))


def _ratio(name: str, over: float, under: float) -> Figure:
    return Figure(name, over / under if under else float("nan"), Unit.RATIO, Better.HIGHER)
