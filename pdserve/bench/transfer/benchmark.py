"""Runs all measurements of ``pdserve bench transfer``, and turns them into rows of a report.

A decode engine's steps are timed, too, while its transfer thread works on the same core: it receives blocks of prompts,
or a prefill engine fetches the blocks that become full (KV return).
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pdserve.bench.engine.subject import Steps, Subject, open_subject
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, this_machine
from pdserve.bench.transfer.bench_engines import (
    BLOCK_TOKENS,
    Assignment,
    CacheShape,
    FetchingEngine,
    OfferingEngine,
    PrefillProcess,
    TransferSetup,
    prefill_process,
)
from pdserve.bench.transfer.yardsticks import NixlRate, copy_bytes_per_s, nixl_rates, perftest_bytes_per_s
from pdserve.config import Switch
from pdserve.config.bench import BenchTransferConfig, CacheMemory
from pdserve.engine.kv_connector.kv_return import RETURNS_PER_S
from pdserve.engine.runner_loading import cpu_kernels
from pdserve.machine.memory import MIB
from pdserve.models.checkpoint.model_files import served_model_name
from pdserve.settings import to_environ

_RECEIVE_ROUNDS = 4
CHUNK_BLOCKS = 16
_ORDERED_AHEAD = 6
"""The number of fetches that are ordered ahead, so that one always moves while a step computes."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The medians over rounds that take turns."""

    alone_s: float
    receiving_s: float
    bytes_per_s: float
    """The rate at which bytes were received meanwhile."""

    @property
    def slowdown(self) -> float:
        return self.receiving_s / self.alone_s


def while_receiving(
    step: Callable[[], object],
    prefill: PrefillProcess,
    shape: CacheShape,
    setup: TransferSetup,
    seconds: float,
    tokens_per_s: float | None,
) -> StepTimes:
    """Times ``step`` alone and with KV blocks coming in at ``tokens_per_s``, in chunks, or at full speed if it is None.

    Raises BenchError, TransferError.
    """
    each_s = seconds / _RECEIVE_ROUNDS / 2
    if tokens_per_s is None:
        assignment, blocks, ahead = Assignment(shape.block_bytes, shape.blocks, setup), shape.blocks, _ORDERED_AHEAD
    else:
        pause_s = CHUNK_BLOCKS * BLOCK_TOKENS / tokens_per_s
        assignment = Assignment(shape.block_bytes, shape.blocks, setup, CHUNK_BLOCKS, pause_s)
        blocks, ahead = min(shape.blocks, CHUNK_BLOCKS * math.ceil(each_s / pause_s + 1)), 1
    engine = FetchingEngine(prefill.assign(assignment), shape, setup)
    alone: list[float] = []
    receiving: list[float] = []
    rates: list[float] = []
    try:
        engine.fetch(CHUNK_BLOCKS)
        for _ in range(_RECEIVE_ROUNDS):
            alone += _steps(step, each_s, lambda: None)
            before, started = engine.bytes_received, time.perf_counter()
            receiving += _steps(lambda: engine.decode(step), each_s, lambda: _top_up(engine, blocks, ahead))
            rates.append((engine.bytes_received - before) / (time.perf_counter() - started))
            engine.finish()
    finally:
        engine.close()
    return StepTimes(statistics.median(alone), statistics.median(receiving), statistics.median(rates))


def _top_up(engine: FetchingEngine, blocks: int, ahead: int) -> None:
    engine.turn()
    while engine.open < ahead:
        engine.order(blocks)


def _steps(step: Callable[[], object], seconds: float, between: Callable[[], None]) -> list[float]:
    times: list[float] = []
    while not times or sum(times) < seconds:
        between()
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return times


_RETURN_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class MeanStep:
    """The mean of all steps of one turn."""

    wall_s: float
    cpu_s: float
    """The CPU time of the process: of the step, and of the transfer thread beside it."""


@dataclass(frozen=True, slots=True)
class ReturnTimes:
    """Rounds of two turns, which follow each other so closely that other load changes little between them."""

    alone: tuple[MeanStep, ...]
    returning: tuple[MeanStep, ...]
    returns_per_s: float
    return_cpu_s: float
    """The CPU time of the decode engine's transfer thread for one return."""

    @property
    def wall_ratio(self) -> float:
        return _median_ratio([cost.wall_s for cost in self.returning], [cost.wall_s for cost in self.alone])

    @property
    def cpu_ratio(self) -> float:
        return _median_ratio([cost.cpu_s for cost in self.returning], [cost.cpu_s for cost in self.alone])


def while_returning(
    step: Callable[[], object], prefill: PrefillProcess, shape: CacheShape, setup: TransferSetup, seconds: float
) -> ReturnTimes:
    """Times ``step`` alone, and with as many returns as a decode node offers in a second.

    Raises BenchError, TransferError.
    """
    each_s = seconds / _RETURN_ROUNDS / 2
    engine = OfferingEngine(prefill.assign(Assignment(shape.block_bytes, shape.blocks, setup)), shape, setup)
    alone: list[MeanStep] = []
    returning: list[MeanStep] = []
    try:
        engine.offer()
        engine.finish()  # the engines have met
        before, thread_cpu_s = engine.returned, engine.cpu_s()
        for _ in range(_RETURN_ROUNDS):
            alone.append(_turn(step, each_s, lambda _: None))
            returning.append(_turn(step, each_s, engine.turn))
            engine.finish()
        returned, thread_cpu_s = engine.returned - before, engine.cpu_s() - thread_cpu_s
    finally:
        engine.close()
    return ReturnTimes(tuple(alone), tuple(returning), returned / (each_s * _RETURN_ROUNDS), thread_cpu_s / returned)


def _turn(step: Callable[[], object], seconds: float, between: Callable[[float], None]) -> MeanStep:
    """Calls ``step`` for so many seconds, and ``between`` with the time before each of them."""
    began_s, cpu_began_s, steps = time.perf_counter(), time.process_time(), 0
    while not steps or time.perf_counter() - began_s < seconds:
        between(time.perf_counter())
        step()
        steps += 1
    return MeanStep((time.perf_counter() - began_s) / steps, (time.process_time() - cpu_began_s) / steps)


def _median_ratio(dividends: list[float], divisors: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(dividends, divisors, strict=True))


_WARM_UP = 2
_IN_A_ROW = 4
_AHEAD = 2
"""The fetches that are under way at once, as on a node with several requests, so that none waits for its order."""

_LEAST_BLOCKS = 8
_MOST_BLOCKS = 4096
_TINY_BYTES = 64
_TINY_BLOCKS = 2048
_COPY_MIB = 64
_STATE_MIB = (1, 16, 64)
_GROUP_BLOCK_BYTES = 768 * 1024
"""Those of gpt-oss-20b in bf16, half of whose layers have a window."""
_GROUP_BLOCKS = 128
_HEAD_DIM = 64
_GROUP_WINDOW = 128
_LATENT_LAYERS = 4
_LATENT_BYTES = _LATENT_LAYERS * (512 + 64) * 2
"""What a token of four layers of DeepSeek V2 Lite has in bf16."""
_LATENT_FP8_BYTES = _LATENT_LAYERS * (512 + 64 + 1)
_LATENT_HEADS_BYTES = _LATENT_LAYERS * 16 * (128 + 64 + 128) * 2
"""What it would have if the keys and values of its 16 heads were stored."""

NOTES = (
    "fetches in a row, two under way at a time, each from the order to the landing of its last block: request, push, "
    "accept on arrival, checksums on both sides; each engine a process on a core of its own",
    "on one host the decode engine's thread copies blocks out of the prefill engine's memory; with --kv-shared-cache "
    "off both copy, in and out of UCX's: CPU time of a block is mostly copying, and its own cost is what a "
    "block of 64 bytes takes",
    "ucx_perftest moves one message's memory over and over, which stays in caches; a fetch moves all of it",
)


@dataclass(frozen=True, slots=True)
class Moves:
    """The times of fetches of ``blocks`` blocks each."""

    block_bytes: int
    blocks: int
    seconds: tuple[float, ...]
    """The mean time of a fetch, for each row of several."""
    receive_cpu_s: float
    """The CPU seconds of the receiving transfer thread for a block."""
    send_cpu_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def cpu_s(self) -> float:
        """The CPU seconds of both transfer threads for a fetch."""
        return (self.receive_cpu_s + self.send_cpu_s) * self.blocks

    @property
    def bytes_per_s(self) -> float:
        return self.block_bytes * self.blocks / self.median_s


def moves(
    prefill: PrefillProcess, shape: CacheShape, blocks: int, setup: TransferSetup, repeats: int
) -> Mapping[Switch, Moves]:
    """Times ``repeats`` rows of fetches of ``blocks`` blocks, without checksums and, if there can be any, with them.

    Raises BenchError, TransferError.
    """
    ways = [way for way in Switch if setup.device == "cpu" or way is Switch.OFF]
    assignment = Assignment(shape.block_bytes, shape.blocks, setup, state_bytes=shape.state_bytes, window=shape.window)
    target = prefill.assign(assignment)
    engines: dict[Switch, FetchingEngine] = {}
    try:
        for checksums in ways:
            own = dataclasses.replace(setup.config, checksums=checksums)
            engines[checksums] = FetchingEngine(target, shape, msgspec.structs.replace(setup, config=own))
            for _ in range(_WARM_UP):
                engines[checksums].fetch(blocks)
        taken = [{way: _timed(prefill, engine, blocks) for way, engine in engines.items()} for _ in range(repeats)]
    finally:
        for engine in engines.values():
            engine.close()
    return {way: _summary(shape, blocks, [turn[way] for turn in taken]) for way in ways}


@dataclass(frozen=True, slots=True)
class _TimedFetch:
    seconds: float
    receive_cpu_s: float
    send_cpu_s: float


def _timed(prefill: PrefillProcess, engine: FetchingEngine, blocks: int) -> _TimedFetch:
    received, sent = engine.cpu_s(), prefill.cpu_s()
    seconds = engine.fetch_in_a_row(blocks, _IN_A_ROW, _AHEAD)
    times = (seconds, engine.cpu_s() - received, prefill.cpu_s() - sent)
    return _TimedFetch(*(time / _IN_A_ROW for time in times))


def _summary(shape: CacheShape, blocks: int, fetches: list[_TimedFetch]) -> Moves:
    return Moves(
        shape.block_bytes,
        blocks,
        tuple(fetch.seconds for fetch in fetches),
        statistics.median(fetch.receive_cpu_s for fetch in fetches) / blocks,
        statistics.median(fetch.send_cpu_s for fetch in fetches) / blocks,
    )


def run(
    config: BenchTransferConfig, folder: Path, cores: tuple[int, int], environ: Mapping[str, str], cache_dir: Path
) -> Report:
    """This process is the decode engine, pinned by the caller to ``cores[0]``; the prefill engine runs on ``cores[1]``.

    Raises BenchError, TransferError or ModelError.
    """
    bench = config.bench
    on_gpu = bench.memory is CacheMemory.CUDA
    device = "cuda" if on_gpu else "cpu"
    setup = TransferSetup(config.transfer, secrets.token_bytes(32), str(cache_dir), device)
    copied = copy_bytes_per_s(_COPY_MIB)
    nixl = nixl_rates(bench.nixl_command, environ) if bench.nixl_command else {}
    rows: list[Row] = []
    with prefill_process(cores[1], environ) as prefill:
        for kib in bench.block_kib:
            _say(f"blocks of {kib} KiB")
            size = kib * 1024
            blocks = min(max(bench.fetch_mib * MIB // size, _LEAST_BLOCKS), _MOST_BLOCKS)
            moved = moves(prefill, CacheShape(size, blocks), blocks, setup, bench.repeats)
            yardsticks = Yardsticks(
                perftest_bytes_per_s(config.transfer, environ, size, cores, survivable=True, memory=bench.memory),
                perftest_bytes_per_s(config.transfer, environ, size, cores, survivable=False, memory=bench.memory),
                nixl.get(size),
                copied,
            )
            rows += transfer_rows(moved, yardsticks)
            if not on_gpu:
                rows.append(checksum_row(moved, BLOCK_TOKENS / bench.prefill_tokens_per_s))
        rows += _group_rows(prefill, setup, bench.repeats, copied)
        if on_gpu:
            return _report(config, rows)
        _say("blocks of 64 bytes")
        tiny = CacheShape(_TINY_BYTES, _TINY_BLOCKS)
        rows.append(overhead_row(moves(prefill, tiny, _TINY_BLOCKS, setup, bench.repeats)))
        if bench.decode_s:
            subject = _subject(config, folder, cache_dir)
            rows += _decode_rows(config, subject, prefill, setup)
    rows.append(copy_row(copied))
    return _report(config, rows)


def _group_rows(prefill: PrefillProcess, setup: TransferSetup, repeats: int, copied: float) -> list[Row]:
    """Returns rows of what models with cache groups move."""
    rows: list[Row] = []
    for mib in _STATE_MIB:
        _say(f"a state of {mib} MiB")
        shape = CacheShape(_GROUP_BLOCK_BYTES, 1, state_bytes=mib * MIB)
        rows += state_rows(moves(prefill, shape, 1, setup, repeats), mib * MIB, copied)
    _say("only what a window has")
    whole = CacheShape(_GROUP_BLOCK_BYTES, _GROUP_BLOCKS)
    windowed = dataclasses.replace(whole, window=_GROUP_WINDOW)
    window, every = (moves(prefill, shape, _GROUP_BLOCKS, setup, repeats) for shape in (windowed, whole))
    rows.append(smaller_row("with windows", "window only", "all blocks", window, every, window=_GROUP_WINDOW))
    _say("a KV cache in FP8")
    shape = CacheShape(_GROUP_BLOCK_BYTES * (_HEAD_DIM + 1) // (2 * _HEAD_DIM), _GROUP_BLOCKS)
    fp8 = moves(prefill, shape, _GROUP_BLOCKS, setup, repeats)
    rows.append(smaller_row("in FP8", "FP8", "bf16", fp8, every))
    _say("latents, and the keys and values of all heads")
    latents, heads = (
        moves(prefill, CacheShape(BLOCK_TOKENS * nbytes, _GROUP_BLOCKS), _GROUP_BLOCKS, setup, repeats)
        for nbytes in (_LATENT_BYTES, _LATENT_HEADS_BYTES)
    )
    rows.append(smaller_row("with latents", "latents", "all heads", latents, heads))
    _say("latents in FP8")
    shape = CacheShape(BLOCK_TOKENS * _LATENT_FP8_BYTES, _GROUP_BLOCKS)
    fp8 = moves(prefill, shape, _GROUP_BLOCKS, setup, repeats)
    rows.append(smaller_row("with latents in FP8", "FP8", "bf16", fp8, latents))
    return rows


def _report(config: BenchTransferConfig, rows: Sequence[Row]) -> Report:
    missing = () if config.bench.nixl_command else ("no --nixl-command was given: NIXL was not measured",)
    return Report("transfer", this_machine(chip_name()), to_environ(config), (*NOTES, *missing), tuple(rows))


def _subject(config: BenchTransferConfig, folder: Path, cache_dir: Path) -> Subject:
    bench = config.bench
    steps = Steps((bench.decode_batch,), (bench.decode_context,), (1,))
    name = config.model.served_model_name or served_model_name(config.model.path, folder)
    return open_subject(
        name, folder, config.model, BLOCK_TOKENS, steps, partial(cpu_kernels, config.cpu.kernels, cache_dir)
    )


def _decode_rows(
    config: BenchTransferConfig, subject: Subject, prefill: PrefillProcess, setup: TransferSetup
) -> list[Row]:
    bench = config.bench
    size = subject.runner.layout.block_bytes
    shape = CacheShape(size, max(bench.fetch_mib * MIB // size, CHUNK_BLOCKS))
    step_rows = subject.decode_rows(bench.decode_batch, bench.decode_context)
    found = []
    for tokens_per_s in (bench.prefill_tokens_per_s, None):
        _say("decode steps, " + (f"{tokens_per_s:g} tok/s coming in" if tokens_per_s else "all that can come in"))
        times = while_receiving(
            lambda: subject.runner.run(step_rows), prefill, shape, setup, bench.decode_s, tokens_per_s
        )
        found.append(decode_row(subject.name, bench.decode_batch, tokens_per_s, times))
    _say("decode steps, blocks returning")
    returns = while_returning(lambda: subject.runner.run(step_rows), prefill, shape, setup, bench.decode_s)
    found.append(return_row(subject.name, bench.decode_batch, returns))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """The rates of the yardsticks at one block size, in bytes/s."""

    perftest: float
    """The rate of ``ucx_perftest`` over endpoints like pdserve's, which outlive their peer."""
    perftest_any: float
    """The rate of ``ucx_perftest`` over the endpoints that UCX makes by default."""
    nixl: NixlRate | None
    copy: float


def transfer_rows(moved: Mapping[Switch, Moves], yardsticks: Yardsticks) -> list[Row]:
    """Returns the engine's rate beside the yardsticks', for each setting of ``--kv-checksums``."""
    return [_transfer_row(way, found, yardsticks) for way, found in moved.items()]


def _transfer_row(way: Switch, found: Moves, yardsticks: Yardsticks) -> Row:
    copy_s = found.block_bytes / yardsticks.copy
    figures = [
        _rate("engine", found.bytes_per_s),
        _rate("ucx_perftest", yardsticks.perftest),
        _rate("ucx_perftest, any endpoint", yardsticks.perftest_any),
        Figure("engine : ucx_perftest", found.bytes_per_s / yardsticks.perftest, Unit.RATIO, Better.HIGHER),
        Figure("engine : any endpoint", found.bytes_per_s / yardsticks.perftest_any, Unit.RATIO, Better.HIGHER),
    ]
    if yardsticks.nixl is not None:
        figures += [
            _rate("NIXL", yardsticks.nixl.total),
            Figure("engine : NIXL", found.bytes_per_s / yardsticks.nixl.total, Unit.RATIO, Better.HIGHER),
            Figure("engine : NIXL moving", found.bytes_per_s / yardsticks.nixl.moving, Unit.RATIO, Better.HIGHER),
        ]
    figures += [
        _us("receive CPU/block", found.receive_cpu_s),
        _us("send CPU/block", found.send_cpu_s),
        _rate("CPU allows", found.block_bytes / max(found.receive_cpu_s, found.send_cpu_s)),
        _us("one copy of a block", copy_s),
    ]
    return Row("transfer", {"block": block_name(found.block_bytes), "checksums": way.value}, tuple(figures))


def state_rows(moved: Mapping[Switch, Moves], nbytes: int, copy_bytes_per_s: float) -> list[Row]:
    """Returns the time of a state of ``nbytes`` bytes, which is one message, for each setting of ``--kv-checksums``."""
    return [
        Row(
            "transfer of a state",
            {"state": f"{nbytes // MIB} MiB", "checksums": way.value},
            (
                Figure("fetch", found.median_s * 1e3, Unit.MS, Better.LOWER),
                _rate("engine", nbytes / found.median_s),
                Figure("engine : copy", nbytes / found.median_s / copy_bytes_per_s, Unit.RATIO, Better.HIGHER),
            ),
        )
        for way, found in moved.items()
    ]


def smaller_row(
    title: str, name: str, beside: str, smaller: Mapping[Switch, Moves], whole: Mapping[Switch, Moves], window: int = 0
) -> Row:
    """Returns a prompt of which less moves, for the reason ``name``, ``beside`` one of as many tokens.

    Half of the layers may have a ``window`` of so many tokens.
    """
    way = Switch.ON if Switch.ON in whole else Switch.OFF
    mine, other = smaller[way], whole[way]
    shape: dict[str, int | str] = {"tokens": _GROUP_BLOCKS * BLOCK_TOKENS}
    if window:
        shape["window of half of the layers"] = window
    figures = (
        Figure(f"fetch, {name}", mine.median_s * 1e3, Unit.MS, Better.LOWER),
        Figure(f"fetch, {beside}", other.median_s * 1e3, Unit.MS, Better.LOWER),
        Figure(f"{name} : {beside}", mine.median_s / other.median_s, Unit.RATIO, Better.LOWER),
        Figure(f"both CPUs, {name} : {beside}", mine.cpu_s / other.cpu_s, Unit.RATIO, Better.LOWER),
    )
    return Row(f"transfer of a prompt {title}", shape, figures)


def checksum_row(moved: Mapping[Switch, Moves], prefill_s: float) -> Row:
    """Returns what checksums add to a fetch, and to a request whose prompt takes ``prefill_s`` a block to compute."""
    on, off = moved[Switch.ON], moved[Switch.OFF]
    cpu_s = on.receive_cpu_s - off.receive_cpu_s + on.send_cpu_s - off.send_cpu_s
    figures = (
        Figure("fetch with", on.median_s * 1e3, Unit.MS, Better.LOWER),
        Figure("fetch without", off.median_s * 1e3, Unit.MS, Better.LOWER),
        _us("added to a block", (on.median_s - off.median_s) / on.blocks),
        _us("receive CPU added", on.receive_cpu_s - off.receive_cpu_s),
        _us("send CPU added", on.send_cpu_s - off.send_cpu_s),
        Figure("with : without", on.median_s / off.median_s, Unit.RATIO, Better.LOWER),
        # This is a small difference of two figures: noise makes it anything near 0, so no report is judged by it.
        Figure("both CPUs added : prefill of a block", cpu_s / prefill_s, Unit.RATIO),
    )
    return Row("checksums", {"block": block_name(on.block_bytes), "blocks": on.blocks}, figures)


def overhead_row(moved: Mapping[Switch, Moves]) -> Row:
    """Returns the cost of a block itself, measured with blocks so small that copying them takes no time."""
    on, off = moved[Switch.ON], moved[Switch.OFF]
    figures = (
        _us("receive CPU", off.receive_cpu_s),
        _us("send CPU", off.send_cpu_s),
        _us("receive CPU with checksums", on.receive_cpu_s),
        _us("send CPU with checksums", on.send_cpu_s),
    )
    return Row("overhead of a block", {"block": block_name(on.block_bytes), "blocks": on.blocks}, figures)


def decode_row(model: str, batch: int, tokens_per_s: float | None, times: StepTimes) -> Row:
    """Returns a row of decode steps with KV blocks coming in, against steps without."""
    rate = f"{tokens_per_s:g} tok/s" if tokens_per_s else "all that can"
    figures = (
        Figure("step alone", times.alone_s * 1e3, Unit.MS, Better.LOWER),
        Figure("step receiving", times.receiving_s * 1e3, Unit.MS, Better.LOWER),
        _rate("received", times.bytes_per_s),
        Figure("receiving : alone", times.slowdown, Unit.RATIO, Better.LOWER),
        Figure("added for 1 GB/s", (times.slowdown - 1) / (times.bytes_per_s / 1e9), Unit.RATIO),
    )
    return Row("decode step while KV blocks come in", {"model": model, "batch": batch, "arriving": rate}, figures)


def return_row(model: str, batch: int, times: ReturnTimes) -> Row:
    """Returns a row of decode steps while a prefill node fetches the blocks that become full, against steps alone."""
    alone, returning = times.alone, times.returning
    figures = (
        Figure("step alone", statistics.median(cost.wall_s for cost in alone) * 1e3, Unit.MS, Better.LOWER),
        Figure("step returning", statistics.median(cost.wall_s for cost in returning) * 1e3, Unit.MS, Better.LOWER),
        Figure("returns in a second", times.returns_per_s, Unit.COUNT),
        Figure("returning : alone", times.wall_ratio, Unit.RATIO, Better.LOWER),
        Figure("CPU alone", statistics.median(cost.cpu_s for cost in alone) * 1e3, Unit.MS, Better.LOWER),
        Figure("CPU returning : alone", times.cpu_ratio, Unit.RATIO, Better.LOWER),
        Figure("CPU of a return", times.return_cpu_s * 1e3, Unit.MS, Better.LOWER),
        Figure("all returns' share of a core", times.return_cpu_s * RETURNS_PER_S, Unit.RATIO, Better.LOWER),
    )
    return Row("decode step while blocks return", {"model": model, "batch": batch}, figures)


def copy_row(bytes_per_s: float) -> Row:
    return Row("copy in memory, one core", {}, (_rate("copy", bytes_per_s),))


def block_name(size: int) -> str:
    return f"{size // 1024} KiB" if size >= 1024 else f"{size} B"


def _rate(name: str, bytes_per_s: float) -> Figure:
    return Figure(name, bytes_per_s / 1e9, Unit.GB_PER_S, Better.HIGHER)


def _us(name: str, seconds: float) -> Figure:
    return Figure(name, seconds * 1e6, Unit.US, Better.LOWER)
